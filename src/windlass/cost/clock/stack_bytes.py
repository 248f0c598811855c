"""Device memory of plans on a software stack other than Windlass's own, for many plans at once.

No program of ours says what another stack holds at each moment, so its fullest moment is taken: a
stage has all its state, the activations of all micro-batches in flight, and what the backward pass
of its largest layer holds. What the stack itself holds comes on top (`StackMemory`).
"""

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.clock.layer_bytes import LayerBytes
from windlass.cost.clock.layer_prices import LayerPrices
from windlass.cost.clock.least_bytes import LeastBytes
from windlass.cost.clock.plan_batch import PlanBatch
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.clock.stage_layout import StageLayout
from windlass.schema import (
    OWN_STACK,
    PRECISION_BYTES,
    Graph,
    Machine,
    MemoryClass,
    PipelineSchedule,
    Plan,
)

GATHERED_LAYERS = 2
"""Layers whose parameters FSDP holds whole at once: the one that runs, and the next."""


def stack_stage_bytes(
    plan: Plan, graph: Graph, machine: Machine
) -> tuple[dict[MemoryClass, float], ...]:
    """Bytes of device memory at the fullest moment of each stage, by class.

    Args:
        machine: a machine that names a stack.
    """
    prices, columns = LayerPrices(plan, graph, machine), PlanColumns.of([plan])
    layout = StageLayout(plan, graph, columns.shape.pipeline, columns.chunk_bounds)
    batch = PlanBatch(columns, layout, prices, machine)
    layers = LayerBytes(prices, plan.batch.sequence)
    by_class = StackBytes(batch, layers).by_class(columns)
    return tuple(
        {name: float(nbytes[stage, 0]) for name, nbytes in by_class.items()}
        for stage in range(plan.parallel.pipeline)
    )


class StackBytes(LeastBytes):
    """Memory of plans on a stack, with `LeastBytes`' interface."""

    def of(self, columns: PlanColumns) -> Floats:
        """Device memory of each stage, `[plan, stage]`.

        Args:
            columns: the plans of the batch; their recompute counts.
        """
        return np.asarray(sum(self.by_class(columns).values())).T

    @property
    def state(self) -> Floats:
        """Weights and optimizer state of each stage, `[plan, stage]`."""
        state = self._state
        return np.asarray(self._layout.by_stage(state.weight_shard + state.optimizer)).T

    def by_class(self, columns: PlanColumns) -> dict[MemoryClass, Floats]:
        """Device memory of each stage by what holds it, each `[stage, plan]`."""
        layout, state, sizes = self._layout, self._state, self._sizes
        memory = (self._batch.machine.stack or OWN_STACK).memory
        full, selective = columns.recompute_modes()
        saved = np.where(selective, sizes.selective.saved, sizes.plain.saved)
        peak = np.where(selective, sizes.selective.backward_peak, sizes.plain.backward_peak)
        kept = sizes.plain.output + np.where(full, 0.0, saved)
        shares = self._live_shares(columns)
        live = shares * layout.by_stage(kept)
        live[-1] -= (shares[-1] - 1) * sizes.plain.saved[-1]  # its backward follows at once
        running = self._fullest(np.where(full, saved, 0.0) + peak)
        by_class: dict[MemoryClass, Floats] = {
            "weights": layout.by_stage(state.weight_shard) + self._gathered(columns),
            "gradients": self._gradients(columns),
            "optimizer": layout.by_stage(state.optimizer),
            "activations": live * memory.activations,
            "working": running * memory.activations,
        }
        context = memory.context_bytes
        outside = self._batch.machine.device.runtime_bytes if context is None else context
        held = np.asarray(sum(by_class.values()))
        by_class["runtime"] = outside + memory.buffer_bytes + memory.allocator_share * held
        return by_class

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
        weights = np.where(columns.parameters > 1, self._state.gathered, 0.0)
        return np.where(
            self._batch.reshards,
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
        return np.where(self._batch.reshards, scattered, kept)

    def _fullest(self, layers: Floats, count: int = 1) -> Floats:
        """Sums over the largest so many layers of each stage, `[stage, plan]`."""
        return np.array(
            [
                np.sort(layers[list(stage)], axis=0)[-count:].sum(axis=0)
                for stage in self._layout.stages
            ]
        )


def live_share(
    schedule: PipelineSchedule, pipeline: int, virtual_stages: int, micros: int, stage: int
) -> float:
    """Micro-batches in flight on a stage; of model chunks, their share of the stage.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.

    Args:
        virtual_stages: model chunks on each stage.
        micros: micro-batches of a step.
    """
    behind = pipeline - stage - 1
    if schedule == "gpipe":
        return float(micros)
    if virtual_stages == 1:
        return float(min(micros, behind + 1))
    in_flight = min(micros * virtual_stages, 2 * behind + (virtual_stages - 1) * pipeline + 1)
    return in_flight / virtual_stages
