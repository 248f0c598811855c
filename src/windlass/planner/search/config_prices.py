"""What bounds know of configurations: seconds and bytes of a micro-batch, and bytes of state."""

from copy import copy
from functools import cached_property
from itertools import groupby
from typing import Self

import numpy as np

from windlass.cost import ArrayClock, Floats, Ints
from windlass.planner.space.plan_space import PipelineOption, PlanSpace
from windlass.schema import DEVICE_TIER

_ANY_SHARDS = 2
"""A degree at which parameters are sharded at all."""
CLOCK_ERROR = 1e-9
"""Relative error of sums of the same seconds in another order."""


class ConfigPrices:
    """Prices of the configurations of a space, each found once.

    Args:
        space: the plan space.
        clock: prices passes.
        budget_bytes: device memory budget; None leaves memory out of the bounds on time.
    """

    def __init__(
        self, space: PlanSpace, clock: ArrayClock, budget_bytes: int | None = None
    ) -> None:
        self._space, self.clock, self._table = space, clock, space.table
        # Other software counts its memory otherwise, and a pin may ask for more recompute.
        counts = space.machine.stack is None and space.minimizes_recompute
        self.budget_bytes = budget_bytes if counts else None
        self._kept: dict[int, Floats] = {}
        self._dropped: dict[PipelineOption, set[int]] = {}
        micros, micro = np.unique(self._table.micro, return_inverse=True)
        sums = self._table.accumulation > 1
        keys = (self._table.mode * len(micros) + micro) * 2 + sums
        self._keys, self._key = np.unique(keys, return_inverse=True)
        self._of_key = [
            (table_mode, int(micros[micro]), bool(summed))
            for key in self._keys.tolist()
            for rest, summed in (divmod(key, 2),)
            for table_mode, micro in (divmod(rest, len(micros)),)
        ]
        """Mode, micro-batch and whether several are summed, `[key]`."""
        self._before = np.full((4, len(self._keys), space.graph.layers + 1), np.nan)
        """Seconds of one micro-batch in all layers before each: forward passes, all passes,
        additions of gradients and full recompute, `[4, key, layer]`."""

    def with_budget(self, budget_bytes: int) -> Self:
        """The bounds under a smaller budget, which know all that these have found."""
        other = copy(self)
        other.budget_bytes = None if self.budget_bytes is None else budget_bytes
        return other

    def drop(self, option: PipelineOption, configs: Ints) -> None:
        """Notes configurations that do not fit under an option, nor will with less memory."""
        self._dropped.setdefault(option, set()).update(configs.tolist())

    def _priced(self, configs: Ints, *, recomputes: bool = False) -> Ints:
        """The key of each configuration, whose passes have been priced, `[config]`."""
        keys = self._key[configs]
        unknown = np.unique(keys[np.isnan(self._before[-1 if recomputes else 0, keys, 0])])
        alike: dict[tuple[int, bool], list[int]] = {}
        for key in unknown.tolist():
            mode, _, sums = self._of_key[key]
            alike.setdefault((mode, sums), []).append(key)
        for (mode, sums), rows in alike.items():
            seconds = self.clock.layer_seconds(
                self._table.modes[mode],
                [self._of_key[key][1] for key in rows],
                accumulates=sums,
                recomputes=recomputes,
            )
            seconds[3:, :, : self._space.graph.first_trained] = 0.0  # they have no backward pass
            self._before[: len(seconds), rows, 0] = 0.0
            self._before[: len(seconds), rows, 1:] = np.cumsum(seconds, axis=2)
        return np.asarray(keys)

    def _bytes_of_pass(self, keys: Ints) -> Floats:
        """`ActivationBytes` of a micro-batch in each layer, plain and selectively recomputed.

        The axes are `[key, 4, 2, layer]`. Layers before the first trained one keep nothing.

        Args:
            keys: in ascending order.
        """
        unknown = [key for key in keys.tolist() if key not in self._kept]
        for mode, keys_of_mode in groupby(unknown, lambda key: self._of_key[key][0]):
            alike = list(keys_of_mode)
            micros = [self._of_key[key][1] for key in alike]
            sizes = self.clock.activation_bytes(self._table.modes[mode], micros)
            sizes[..., : self._space.graph.first_trained] = 0.0
            self._kept.update(zip(alike, sizes, strict=True))
        return np.array([self._kept[key] for key in keys.tolist()])

    def _bytes_of_state(self, configs: Ints) -> tuple[Floats, Floats, Floats]:
        """Bytes of the process; and for each parameter of a stage, and each trained one.

        Those of weights, and of gradients beside them, are `[item, 2]`.
        """
        space, table = self._space, self._table
        process, weights, gradients, state, context = self._state_of_modes[:, table.mode[configs]]
        replicas, pins = table.data[configs] * context, space.request.sharding
        has_sums = (table.accumulation[configs] > 1) & (space.machine.stack is None)
        whole = np.stack([weights, np.where(has_sums, gradients, 0.0)], axis=1)
        if True in space.reshards(_ANY_SHARDS):
            whole = whole / np.broadcast_to(pins.parameters or replicas, replicas.shape)[:, None]
        return process, whole, state / (pins.optimizer or replicas)

    @cached_property
    def _state_of_modes(self) -> Floats:
        """Bytes of the process; of weights, gradients and optimizer state; context ranks.

        State is that of each parameter of a replica's stage. The axes are `[5, mode]`.
        """
        space, rows = self._space, []
        for mode in self._table.modes:
            plan = space.base.model_copy(update={"precision": mode.precision})
            tiers = space.optimizer_tiers(mode.precision)
            state = plan.optimizer_bytes_per_parameter if tiers == (DEVICE_TIER,) else 0.0
            # No rank has fewer of the experts.
            least = int(mode.tensor) * (mode.expert or 1)
            sizes = (plan.parameter_itemsize, plan.gradient_itemsize, state)
            process = self._process_bytes(compiled=mode.compiled)
            rows.append((process, *(size / least for size in sizes), mode.context or 1))
        return np.array(rows).T

    def _process_bytes(self, *, compiled: bool) -> int:
        """Bytes of a process before its first tensor."""
        machine = self._space.machine
        stated = machine.stack.memory.context_bytes if machine.stack else None
        return machine.device.process_bytes(compiled=compiled) if stated is None else stated

    @cached_property
    def _parameters(self) -> Ints:
        """Parameters, and trained ones, of all layers before each, `[2, layer + 1]`."""
        kinds = self._space.graph.layer_kinds()
        counts = [(0, 0), *((kind.parameter_count, kind.trained_count) for kind in kinds)]
        return np.cumsum(counts, axis=0).T

    def _pace(self, pipelines: Ints, configs: Ints) -> Floats:
        """Factor by which the slowest host lengthens a step, `[item]`."""
        devices = self._table.devices[configs] * pipelines
        numbers, place = np.unique(devices, return_inverse=True)
        factors = [self._space.machine.straggler_factor(int(count)) for count in numbers]
        return np.asarray(np.array(factors)[place])
