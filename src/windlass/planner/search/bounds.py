"""Lower bounds on the step time of configurations, before any of their plans is spelled out.

1. Products of all layers at the fastest rate that the machine states, on all stages at once.
2. Passes, with additions of gradients from the second micro-batch on: an even part of them on each
   stage, or those of the slowest layer.
3. Stages: the same of the slowest stage, with the first micro-batch's way to it and the last
   gradient's way back, and with the recompute that its memory asks for.
"""

from functools import cache
from itertools import pairwise
from math import inf

import numpy as np

from windlass.cost import ArrayClock, Bools, Floats, Ints, PipelineShape, waiting_microbatches
from windlass.planner.search.config_prices import CLOCK_ERROR, ConfigPrices
from windlass.planner.space.phase_space import phase_schedules
from windlass.planner.space.plan_space import PipelineOption, PlanSpace
from windlass.planner.space.stage_partition import balanced_partition
from windlass.schema import Precision

_FOREVER = 1e9
"""Seconds to recompute for a byte where no layer can be recomputed."""


class ConfigBounds(ConfigPrices):
    """Lower bounds on the configurations of a space; arguments are those of `ConfigPrices`."""

    def __init__(
        self, space: PlanSpace, clock: ArrayClock, budget_bytes: int | None = None
    ) -> None:
        super().__init__(space, clock, budget_bytes)
        self._relief: dict[tuple[int, bool], float] = {}
        self._products = cache(self._product_seconds)
        self._stage_table = cache(self._find_stage_table)
        self.turns, self._spanning_turn = cache(self._find_turns), cache(self._find_spanning_turn)

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

    def in_phases(
        self, pipelines: Ints, configs: Ints, below_seconds: float, *, spans: bool
    ) -> Floats:
        """Seconds of passes of plans in phases, `[item]`, looked at closely below a limit.

        A stage sends nothing on before all micro-batches have passed all of its phases but the
        last, and nothing back before they have passed all but the first backward. All layers but
        those of the last phase of their stage are recomputed. Where phases span all stages
        (`spans`), those before the last phase of any are, and stages work at once.
        """
        seconds = self.passes(pipelines, configs)
        near = np.flatnonzero(seconds < below_seconds)
        for pipeline in np.unique(pipelines[near]).tolist():
            own = near[pipelines[near] == pipeline]
            schedules = phase_schedules(self._space, pipeline)
            if not any((each == "interleaved") == spans for each in schedules):
                seconds[own] = inf
            elif spans:
                seconds[own] = self.spanning_passes(pipeline, configs[own]).max(axis=0)
            else:
                way, stages = self.phase_stages(pipeline, configs[own])
                seconds[own] = np.maximum(way, stages.max(axis=1))
        seconds[near] *= self._pace(pipelines[near], configs[near])
        return seconds

    def phase_stages(self, pipeline: int, configs: Ints) -> tuple[Floats, Floats]:
        """Seconds of one way through plans in phases, `[item]`, and of stages, `[item, stage]`.

        The way has the forward passes of all phases but the last of each stage and the backward
        passes of all but the first, and both ends of the pipeline whole.
        """
        keys, place = np.unique(self._priced(configs, recomputes=True), return_inverse=True)
        bounds, count = self._space.chunk_bounds(pipeline), self._table.accumulation[configs, None]
        begin, end = np.array(bounds[:-1]), np.array(bounds[1:])
        fetched, turns = self.turns(pipeline)
        forward, both, sums, again = self._before[:, keys]

        def ahead(end: Ints) -> Floats:
            """Seconds of forward passes to a layer of each stage."""
            return np.asarray(count * (forward[:, end] - forward[:, begin])[place])

        def back(begin: Ints) -> Floats:
            """Seconds of backward passes down to a layer of each stage, with their recompute."""
            passes = (both - forward)[:, end] - (both - forward)[:, begin]
            passes += again[:, np.maximum(begin, turns)] - again[:, begin]
            added = sums[:, end] - sums[:, begin]
            return np.asarray(count * passes[place] + (count - 1) * added[place])

        way = ahead(np.append(turns[:-1], end[-1])) + back(np.append(begin[0], fetched[1:]))
        return way.sum(axis=1), ahead(end) + back(begin)

    def spanning_passes(self, pipeline: int, configs: Ints) -> Floats:
        """Seconds of passes of plans whose phases span all stages, `[2, item]`.

        They are spread evenly, and those of one micro-batch after all others in the slowest layer.
        The last phases of all stages have no more parameters than as many times the largest of two
        phases a stage.
        """
        keys, place = np.unique(self._priced(configs, recomputes=True), return_inverse=True)
        turn = self._spanning_turn(pipeline)
        forward, both, sums, again = self._before[:, keys]
        again = np.minimum(again, again[:, [turn]])
        passes, added = (both[:, -1] + again[:, -1])[place], sums[:, -1][place]
        slowest = np.maximum(
            np.diff(forward, axis=1), np.diff(both - forward + sums + again, axis=1)
        ).max(axis=1)  # fmt: skip
        count = self._table.accumulation[configs]
        even = (count * passes + (count - 1) * added) / pipeline
        return np.array([even, passes + (count - 1) * slowest[place]])

    def _find_spanning_turn(self, pipeline: int) -> int:
        """First layer that may not be recomputed in phases that span all stages."""
        before = self._parameters[0]
        chunks = min(2 * pipeline, len(before) - 1)
        partition = balanced_partition(tuple(np.diff(before).tolist()), chunks)
        most = max(before[end] - before[begin] for begin, end in partition)
        return int((before[-1] - before <= pipeline * most).argmax())

    def _find_turns(self, pipeline: int) -> tuple[Ints, Ints]:
        """First layer of each stage surely behind its first phase, and perhaps in its last.

        Each is `[stage]`; from the second one on layers may not be recomputed.

        A stage is divided so that its largest phase has as few parameters as possible. In more
        phases than two the largest, and so the first or last, has no more than the larger of two.
        """
        before, turns = self._parameters[0], []
        for begin, end in pairwise(self._space.chunk_bounds(pipeline)):
            first, last = before[begin : end + 1] - before[begin], before[end] - before[begin:end]
            most = np.maximum(first[1:-1], last[1:]).min(initial=last[0])
            first_end = end - int((first <= most)[::-1].argmax())
            turns.append((first_end, begin + int((last <= most).argmax())))
        fetched, turn = np.array(turns).T
        return fetched, turn

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
        running = self._bytes_of_pass(keys)[:, 1:3].sum(axis=1).min(axis=1)
        held = weights * parameters + gradients * trained * sums + running + process
        return np.asarray((held.max(axis=1) * (1 - CLOCK_ERROR) <= self.budget_bytes)[place])

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
        if dropped := self._dropped.get(option):
            seconds[np.isin(configs, list(dropped))] = inf
        return np.asarray(seconds.max(axis=1) * pace)

    def _recompute_seconds(self, option: PipelineOption, configs: Ints) -> Floats:
        """Seconds of a micro-batch's recompute without which stages do not fit, `[item, stage]`.

        At a stage's fullest moment micro-batches wait in it with what its layers keep. To recompute
        a layer, wholly or selectively, takes its seconds for each byte that it saves; a stage does
        so for as many layers in each of its chunks, as far as these have them. It takes forever
        where a stage does not fit even if it recomputes all of them.
        """
        keys, place = np.unique(self._key[configs], return_inverse=True)
        bounds, own, share = self._stage_table(option.pipeline, option.virtual_stages)
        turns, last = (option.virtual_stages, option.pipeline), bounds[1:] - 1
        sizes = self._bytes_of_pass(keys)
        output, saved, peak, _ = np.moveaxis(sizes[:, :, 0], 1, 0)
        chunks = np.add.reduceat(output + saved, bounds[:-1], axis=1)
        chunks -= output[:, last]  # it leaves with the pass
        inner = saved.copy()
        inner[:, [0, -1]] = 0.0
        saving = np.add.reduceat(inner, bounds[:-1], axis=1)
        # The last layer of a chunk is the first to run backward, and saves all again before that.
        running, some = (sizes[:, 1:3, at].sum(axis=1)[:, last] for at in (0, 1))
        running = np.where(inner[:, last] > 0, np.minimum(running, some), peak[:, last])
        running = running.reshape(-1, *turns).min(axis=1)[place]
        process, whole, state = self._bytes_of_state(configs)
        always = process[:, None] + whole[:, :1] * own[0] + state[:, None] * own[1]
        microbatches, row = np.unique(self._table.accumulation[configs], return_inverse=True)
        shapes = (
            PipelineShape(option.schedule, *turns[::-1], each) for each in microbatches.tolist()
        )
        waiting = np.array([waiting_microbatches(each) for each in shapes])
        waiting = waiting.reshape(len(microbatches), 2, *turns)
        alike = len(np.unique(self.clock.columns[1:-1])) == 1
        most = waiting.sum(axis=2) * share if alike else waiting.max(axis=2)
        over, never = np.zeros((2, len(configs), option.pipeline))
        for at, gradients in enumerate((0.0, whole[:, 1:] * own[1])):
            held, least = (
                (waiting[row, at] * each[place].reshape(-1, *turns)).sum(axis=1)
                for each in (chunks, chunks - saving)
            )
            room = (self.budget_bytes or 0) / (1 - CLOCK_ERROR) - always - gradients
            over = np.maximum(over, (held - room) / np.maximum(most[row, at], 1e-9))
            never[least + np.where(waiting[row, at].any(axis=1), running, 0.0) > room] = inf
        seconds = np.zeros(len(keys))
        for at in np.unique(place[over.any(axis=1)]).tolist():
            mode = self._table.modes[self._of_key[keys[at]][0]]
            selects = "selective" in self._space.recomputes(option, mode)
            seconds[at] = self._seconds_of_byte(int(keys[at]), selects=selects)
        return over * seconds[place][:, None] + never

    def _find_stage_table(self, pipeline: int, virtual_stages: int) -> tuple[Ints, Ints, Floats]:
        """First layer of each chunk; parameters of stages; a chunk's share of what can recompute.

        Parameters, and trained ones, are `[2, stage]`; the share is at most, `[stage]`.
        """
        bounds = np.array(self._space.chunk_bounds(pipeline * virtual_stages))
        turns = virtual_stages, pipeline
        own = np.diff(self._parameters[:, bounds]).reshape(2, *turns).sum(axis=1)
        able = np.minimum(bounds[1:], bounds[-1] - 1) - np.maximum(bounds[:-1], 1)
        able = np.maximum(able, 0).reshape(turns)
        return bounds, own, able.max(axis=0) / np.maximum(able.sum(axis=0), 1)

    def _seconds_of_byte(self, key: int, *, selects: bool) -> float:
        """Seconds to recompute for each byte that this saves, at least."""
        if (key, selects) not in self._relief:
            mode, micro, sums = self._of_key[key]
            inner = slice(max(1, self._space.graph.first_trained), -1)
            plain, some = self._kept[key][1, :, inner]
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
