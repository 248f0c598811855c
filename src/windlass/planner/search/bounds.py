"""Lower bounds on the step time of configurations, before any of their plans is spelled out.

1. Products of all layers at the fastest rate that the machine states, on all stages at once.
2. Passes, with additions of gradients from the second micro-batch on: an even part of them on each
   stage, or those of the slowest layer.
3. Stages: the same of the slowest stage, with the first micro-batch's way to it and the last
   gradient's way back, and with the recompute that its memory asks for.
"""

from copy import copy
from functools import cache, cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple, Self

import numpy as np

from windlass.cost import ArrayClock, Bools, Floats, Ints, PipelineShape, waiting_microbatches
from windlass.planner.search.phase_bounds import PassTimes, StateExchanges, StateTransfers
from windlass.planner.space.phase_space import phase_schedules
from windlass.planner.space.plan_space import PipelineOption, PlanSpace
from windlass.planner.space.stage_partition import balanced_partition
from windlass.schema import DEVICE_TIER, Graph, Machine, Precision

_ANY_SHARDS = 2
"""A degree at which parameters are sharded at all."""
CLOCK_ERROR = 1e-9
"""Relative error of sums of the same seconds in another order."""


_FOREVER = 1e9
"""Seconds to recompute for a byte where no layer can be recomputed."""


class PhasePrices(NamedTuple):
    """Seconds of what plans in phases do."""

    times: PassTimes
    exchanges: StateExchanges
    transfers: StateTransfers

    @classmethod
    def of(cls, graph: Graph, machine: Machine) -> Self:
        """Prices of a model's plans on a machine, of which none is known yet."""
        about = graph, machine
        return cls(PassTimes(*about), StateExchanges(*about), StateTransfers(*about))


class ConfigBounds:
    """Lower bounds on the configurations of a space.

    Args:
        space: the plan space.
        clock: prices passes.
        budget_bytes: device memory budget; None leaves memory out of the bounds on time.
        phases: prices of plans in phases; None makes new ones.
    """

    def __init__(
        self,
        space: PlanSpace,
        clock: ArrayClock,
        budget_bytes: int | None = None,
        phases: PhasePrices | None = None,
    ) -> None:
        self.phases = phases or PhasePrices.of(space.graph, space.machine)
        self._space, self.clock, self._table = space, clock, space.table
        # Other software counts its memory otherwise, and a pin may ask for more recompute.
        counts = space.machine.stack is None and space.minimizes_recompute
        self.budget_bytes = budget_bytes if counts else None
        self._kept: dict[int, Floats] = {}
        self._relief: dict[tuple[int, bool], float] = {}
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
        self._products = cache(self._product_seconds)
        self.turns, self._spanning_turn = cache(self._find_turns), cache(self._find_spanning_turn)

    def with_budget(self, budget_bytes: int) -> Self:
        """The bounds under another budget, which know all prices that these have found."""
        other = copy(self)
        other.budget_bytes = None if self.budget_bytes is None else budget_bytes
        return other

    def products(self, pipelines: Ints) -> Floats:
        """Seconds of matrix products alone, `[pipeline, config]`; infinite on too few devices."""
        table = self._table
        rates = np.array(
            [
                self._products(each.tensor, each.precision) / (each.context or 1)
                for each in table.modes
            ]
        )
        one = rates[table.mode] * (table.micro * table.accumulation)
        fits = pipelines[:, None] * table.devices <= self._space.machine.devices
        return np.where(fits, one / pipelines[:, None], np.inf)

    def passes(self, pipelines: Ints, configs: Ints) -> Floats:
        """Seconds of passes that are spread evenly over stages, `[item]`."""
        keys, place = np.unique(self._priced(configs), return_inverse=True)
        _, both, sums, _ = self._before[:, keys]
        times = self._table.accumulation[configs]
        each, added = np.diff(both, axis=1), np.diff(sums, axis=1)
        one = np.arange(len(keys)), (each + added).argmax(axis=1)
        slowest = times * each[one][place] + (times - 1) * added[one][place]
        even = (times * both[place, -1] + (times - 1) * sums[place, -1]) / pipelines
        return np.asarray(np.maximum(even, slowest) * self._pace(pipelines, configs))

    def in_phases(self, pipelines: Ints, configs: Ints, below_seconds: float) -> Floats:
        """Seconds of passes of plans in phases, `[item]`, looked at closely below a limit.

        A stage sends nothing on before all micro-batches have passed all of its phases but the
        last, and nothing back before they have passed all but the first backward. So each layer's
        forward or backward passes have the time of no other stage's. All layers but those of the
        last phase of their stage are recomputed. Where phases span all stages, those before the
        last phase of any are, and stages work at once.
        """
        seconds = self.passes(pipelines, configs)
        near = np.flatnonzero(seconds < below_seconds)
        keys, place = np.unique(self._priced(configs[near], recomputes=True), return_inverse=True)
        forward, both = (np.diff(self._before[at, keys]) for at in (0, 1))
        way = np.minimum(forward, both - forward).sum(axis=1)[place]
        way *= self._table.accumulation[configs[near]] * (pipelines[near] > 1)
        for pipeline in np.unique(pipelines[near]).tolist():
            own = pipelines[near] == pipeline
            schedules, least = phase_schedules(self._space, pipeline), np.full(own.sum(), inf)
            if schedules != ("interleaved",):
                least = np.maximum(way[own], self.phase_stages(pipeline, configs[near][own]).max(1))
            if "interleaved" in schedules:
                least = np.minimum(least, self.spanning_passes(pipeline, configs[near][own]))
            seconds[near[own]] = least
        seconds[near] *= self._pace(pipelines[near], configs[near])
        return seconds

    def phase_stages(self, pipeline: int, configs: Ints) -> Floats:
        """Seconds of the passes of each stage of plans in phases, `[item, stage]`."""
        keys, place = np.unique(self._priced(configs, recomputes=True), return_inverse=True)
        bounds, turns = np.array(self._space.chunk_bounds(pipeline)), self.turns(pipeline)
        _, both, sums, again = self._before[:, keys]
        passes, added = np.diff(both[:, bounds]), np.diff(sums[:, bounds])
        passes += again[:, turns] - again[:, bounds[:-1]]
        count = self._table.accumulation[configs, None]
        return np.asarray(count * passes[place] + (count - 1) * added[place])

    def spanning_passes(self, pipeline: int, configs: Ints) -> Floats:
        """Seconds of passes of plans whose phases span all stages, spread evenly, `[item]`.

        The last phases of all stages have no more parameters than as many times the largest of two
        phases a stage.
        """
        keys, place = np.unique(self._priced(configs, recomputes=True), return_inverse=True)
        turn = self._spanning_turn(pipeline)
        _, both, sums, again = self._before[:, keys]
        passes, added = (both[:, -1] + again[:, turn])[place], sums[:, -1][place]
        count = self._table.accumulation[configs]
        return np.asarray((count * passes + (count - 1) * added) / pipeline)

    def _find_spanning_turn(self, pipeline: int) -> int:
        """First layer that may not be recomputed in phases that span all stages."""
        before = self._parameters[0]
        chunks = min(2 * pipeline, len(before) - 1)
        partition = balanced_partition(tuple(np.diff(before).tolist()), chunks)
        most = max(before[end] - before[begin] for begin, end in partition)
        return int((before[-1] - before <= pipeline * most).argmax())

    def _find_turns(self, pipeline: int) -> Ints:
        """First layer of each stage that may not be recomputed in phases, `[stage]`.

        A stage is divided so that its largest phase has as few parameters as possible. In more
        phases than two the largest, and so the last, has no more than the larger of two.
        """
        before, turns = self._parameters[0], []
        for begin, end in pairwise(self._space.chunk_bounds(pipeline)):
            first, last = before[begin : end + 1] - before[begin], before[end] - before[begin:end]
            most = np.maximum(first[1:-1], last[1:]).min(initial=last[0])
            turns.append(begin + int((last <= most).argmax()))
        return np.array(turns)

    def state_bytes(self, pipelines: Ints, configs: Ints) -> Floats:
        """Bytes of state and process on an average stage that shares all it can, `[item]`.

        Before the last micro-batch's gradients are reduced, weights, gradients of all earlier ones
        and the optimizer state are there together. Other software may sum gradients elsewhere.
        Where parameters are gathered for each pass, replicas share weights and gradients too.
        """
        graph = self._space.graph
        process, weights, state = self._bytes_of_state(configs)
        counts = graph.parameter_count, graph.trained_count
        return np.asarray(process + (weights @ counts + state * counts[1]) / pipelines)

    def holds_layers(self, configs: Ints) -> Bools:
        """Whether the budget may hold each layer with what a micro-batch saves in it, `[item]`.

        Even if layers take turns one by one, their weights are whole while they run backward, and
        so are the gradients that several micro-batches sum.
        """
        if self.budget_bytes is None:
            return np.ones(len(configs), dtype=bool)
        keys, place = np.unique(self._key[configs], return_inverse=True)
        modes = np.array([self._of_key[key][0] for key in keys.tolist()])
        process, weights, gradients, *_ = self._state_of_modes[:, modes, None]
        parameters, trained = np.diff(self._parameters)
        sums = np.array([[self._of_key[key][2]] for key in keys.tolist()])
        saved = np.array([self._kept_bytes(key)[0].min(axis=0) for key in keys.tolist()])
        held = weights * parameters + gradients * trained * sums + saved + process
        return np.asarray((held.max(axis=1) * (1 - CLOCK_ERROR) <= self.budget_bytes)[place])

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

    def stages(self, option: PipelineOption, configs: Ints, below_seconds: float = inf) -> Floats:
        """Seconds of the slowest stage's passes, and of the way to it and back, `[item]`.

        Args:
            option: how layers are divided over stages.
            configs: the configurations.
            below_seconds: seconds from which on a bound needs to be no closer.
        """
        ends = list(self._space.chunk_bounds(option.pipeline * option.virtual_stages))
        chunks = np.diff(self._before[:, self._priced(configs)][..., ends], axis=2)
        turns = chunks.reshape(4, len(configs), option.virtual_stages, option.pipeline)
        times = self._table.accumulation[configs, None]
        forward, both, *_ = turns[:, :, 0]
        # Weight gradients of a split backward may come after the way back.
        way = forward if option.schedule == "zero-bubble" else both
        _, passes, sums, _ = turns.sum(axis=2)
        seconds = times * passes + (times - 1) * sums + np.cumsum(way, axis=1) - way
        pace = self._pace(np.array(option.pipeline), configs)
        near = np.flatnonzero(seconds.max(axis=1) * pace <= below_seconds)
        if self.budget_bytes is not None and near.size:
            seconds[near] += times[near] * self._recompute_seconds(option, configs[near])
        return np.asarray(seconds.max(axis=1) * pace)

    def _recompute_seconds(self, option: PipelineOption, configs: Ints) -> Floats:
        """Seconds of a micro-batch's recompute without which stages do not fit, `[item, stage]`.

        At a stage's fullest moment micro-batches wait in it with what its layers keep. To recompute
        a layer, wholly or selectively, takes its seconds for each byte that it saves; a stage does
        so for as many layers in each of its chunks, as far as these have them.
        """
        keys, place = np.unique(self._key[configs], return_inverse=True)
        bounds = np.array(self._space.chunk_bounds(option.pipeline * option.virtual_stages))
        turns = option.virtual_stages, option.pipeline
        kept = np.array([self._kept_bytes(key) for key in keys.tolist()])
        chunks = np.add.reduceat(kept[:, 0, 0] + kept[:, 1, 0], bounds[:-1], axis=1)
        chunks -= kept[:, 1, 0][:, bounds[1:] - 1]  # it leaves with the pass
        process, whole, state = self._bytes_of_state(configs)
        own = np.diff(self._parameters[:, bounds]).reshape(2, *turns).sum(axis=1)
        always = process[:, None] + whole[:, :1] * own[0] + state[:, None] * own[1]
        able = np.minimum(bounds[1:], bounds[-1] - 1) - np.maximum(bounds[:-1], 1)
        able = np.maximum(able, 0).reshape(turns)
        share = able.max(axis=0) / np.maximum(able.sum(axis=0), 1)
        alike = len(np.unique(self.clock.columns[1:-1])) == 1
        microbatches, row = np.unique(self._table.accumulation[configs], return_inverse=True)
        shapes = (
            PipelineShape(option.schedule, *turns[::-1], each) for each in microbatches.tolist()
        )
        waiting = np.array([waiting_microbatches(each) for each in shapes])
        waiting = waiting.reshape(len(microbatches), 2, *turns)
        most = waiting.sum(axis=2) * share if alike else waiting.max(axis=2)
        bytes_of_one = np.zeros((len(configs), option.pipeline))
        for at, gradients in enumerate((0.0, whole[:, 1:] * own[1])):
            held = (waiting[row, at] * chunks[place].reshape(-1, *turns)).sum(axis=1)
            over = (always + gradients + held) * (1 - CLOCK_ERROR) - (self.budget_bytes or 0)
            over = np.where(over > 0, over, 0.0) / np.maximum(most[row, at], 1e-9)
            bytes_of_one = np.maximum(bytes_of_one, over)
        seconds = np.zeros(len(configs))
        for item in np.flatnonzero(bytes_of_one.any(axis=1)).tolist():
            mode = self._table.modes[self._table.mode[configs[item]]]
            selects = "selective" in self._space.recomputes(option, mode)
            seconds[item] = self._seconds_of_byte(int(keys[place[item]]), selects=selects)
        return np.asarray(bytes_of_one * seconds[:, None])

    def _kept_bytes(self, key: int) -> Floats:
        """Bytes that layers save, and of outputs, of a micro-batch; plain, selectively recomputed.

        The axes are `[2, 2, layer]`. Layers before the first trained one keep nothing.
        """
        if key not in self._kept:
            mode, micro, _ = self._of_key[key]
            kept = self.clock.kept_bytes(self._table.modes[mode], micro)
            kept[..., : self._space.graph.first_trained] = 0.0
            self._kept[key] = kept
        return self._kept[key]

    def _seconds_of_byte(self, key: int, *, selects: bool) -> float:
        """Seconds to recompute for each byte that this saves, at least."""
        if (key, selects) not in self._relief:
            mode, micro, sums = self._of_key[key]
            inner = slice(max(1, self._space.graph.first_trained), -1)
            (plain, some), _ = self._kept_bytes(key)[..., inner]
            whole, selective = self.clock.recompute_seconds(
                self._table.modes[mode], micro, accumulates=sums, selects=selects
            )[:, inner]
            with np.errstate(divide="ignore", invalid="ignore"):
                each = np.where(plain > 0, whole / plain, np.inf)
                other = np.where(plain > some, selective / (plain - some), np.inf)
            self._relief[key, selects] = min(
                _FOREVER, float(each.min(initial=inf)), float(other.min(initial=inf))
            )
        return self._relief[key, selects]

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

    def _fastest_products(self, precision: Precision) -> float:
        """FLOP/s of a matrix product at its best."""
        rate = self._space.machine.device.rate(precision)
        curves = () if rate.tiles else (rate.curve, rate.biased or rate.curve)
        rates = [
            # Tiles keep the processors as busy as this at most.
            rate.peak * (rate.tiles.efficiency if rate.tiles else 1.0),
            *(point.rate for curve in curves for point in curve.points),
            *(each.flop_rate for each in (*rate.products, *rate.sparse_products)),
        ]
        fastest = max(rates)
        if rate.sparse_efficiency is not None:
            fastest *= max(1.0, *(point.rate for point in rate.sparse_efficiency.points))
        if self._space.machine.stack is not None:
            fastest *= max(1.0, self._space.machine.stack.products)
        return fastest

    def _product_seconds(self, tensor: int, precision: Precision) -> float:
        """Seconds of one sequence's products on one tensor-parallel rank, at the fastest rate."""
        fastest = self._fastest_products(precision)
        kinds, total = self._space.graph.shard(tensor).kinds, 0.0
        for span in self._space.graph.layer_runs:
            costs = kinds[span.kind].costs_for(precision)
            total += span.count * min(
                sum(
                    op.flop.at(1, self._space.sequence)
                    for op in (*cost.forward, *cost.backward)
                    if op.kind == "matmul" and op.shape is not None
                )
                for cost in costs
            )
        return total / fastest
