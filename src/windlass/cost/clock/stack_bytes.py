"""Bytes of each stage on a software stack other than Windlass's own, for many plans at once.

The same sums as `cost.stack_memory`, which says what they mean.
"""

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.clock.least_bytes import LeastBytes
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.stack_memory import GATHERED_LAYERS, live_share
from windlass.schema import OWN_STACK, PRECISION_BYTES


class StackBytes(LeastBytes):
    """Memory of plans on a stack, with `LeastBytes`' interface."""

    def of(self, columns: PlanColumns) -> Floats:
        """Device memory of each stage, `[plan, stage]`.

        Args:
            columns: the plans of the batch; their recompute counts.
        """
        layout, state, sizes = self._layout, self._state, self._sizes
        device = self._batch.machine.device
        memory = (self._batch.machine.stack or OWN_STACK).memory
        full, selective = columns.recompute_modes()
        saved = np.where(selective, sizes.selective.saved, sizes.plain.saved)
        peak = np.where(selective, sizes.selective.backward_peak, sizes.plain.backward_peak)
        kept = sizes.plain.output + np.where(full, 0.0, saved)
        shares = self._live_shares(columns)
        live = shares * layout.by_stage(kept)
        live[-1] -= (shares[-1] - 1) * sizes.plain.saved[-1]
        running = self._fullest(np.where(full, saved, 0.0) + peak)
        held = memory.activations * (live + running)
        held += layout.by_stage(state.weight_shard) + self._gathered(columns)
        held += layout.by_stage(state.optimizer) + self._gradients(columns)
        context = memory.context_bytes
        outside = device.runtime_bytes if context is None else context
        held = (1 + memory.allocator_share) * held + outside + memory.buffer_bytes
        return np.asarray(held.T)

    def _live_shares(self, columns: PlanColumns) -> Floats:
        """Micro-batches in flight, `[stage, plan]`."""
        shape = columns.shape
        counts, place = np.unique(columns.accumulation, return_inverse=True)
        shares = [
            [
                live_share(shape.schedule, shape.pipeline, shape.virtual_stages, int(count), stage)
                for count in counts
            ]
            for stage in range(shape.pipeline)
        ]
        return np.array(shares)[:, place]

    def _gathered(self, columns: PlanColumns) -> Floats:
        """Whole parameters beside the shards that stay, `[stage, plan]`."""
        weights = np.where(columns.parameters > 1, self._state.weights, 0.0)
        return np.where(
            self._reshards(columns),
            self._fullest(weights, GATHERED_LAYERS),
            self._layout.by_stage(weights),
        )

    def _gradients(self, columns: PlanColumns) -> Floats:
        stack, state, by_stage = self._batch.machine.stack, self._state, self._layout.by_stage
        itemsizes = np.array([PRECISION_BYTES[each.precision] for each in columns.configs])
        narrow = itemsizes[columns.config].astype(float)
        wide = np.where(columns.accumulation > 1, np.maximum(4.0, narrow), narrow)
        whole = by_stage(state.gradients)
        own = stack or OWN_STACK
        kept = whole * (narrow / wide if own.gradient_sums == "half" else 1.0)
        kept = kept + whole / wide * own.memory.gradient_bytes
        scattered = by_stage(state.gradient_shard) + self._fullest(state.gradients) * narrow / wide
        return np.where(self._reshards(columns), scattered, kept)

    def _reshards(self, columns: PlanColumns) -> Floats:
        return np.array([bool(each.reshard) for each in columns.configs])[columns.config]

    def _fullest(self, layers: Floats, count: int = 1) -> Floats:
        """Sums over the largest so many layers of each stage, `[stage, plan]`."""
        return np.array(
            [
                np.sort(layers[list(stage)], axis=0)[-count:].sum(axis=0)
                for stage in self._layout.stages
            ]
        )
