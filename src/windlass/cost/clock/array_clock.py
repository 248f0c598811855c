"""Array clock: step time and memory of many plans at once, from the event simulator's costs."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.clock.layer_bytes import LayerBytes
from windlass.cost.clock.layer_prices import LayerPrices
from windlass.cost.clock.least_bytes import LeastBytes
from windlass.cost.clock.pass_arrays import PassArrays
from windlass.cost.clock.plan_batch import MachinesBatch, PlanBatch
from windlass.cost.clock.plan_columns import LayerConfig, PlanColumns
from windlass.cost.clock.price_keys import ExchangeKey, PassWay, StateKey
from windlass.cost.clock.stack_bytes import StackBytes
from windlass.cost.clock.stage_layout import StageLayout
from windlass.cost.clock.step_walk import StageEnds, stage_ends
from windlass.program import InstructionKind, selective_layers
from windlass.schema import Graph, Machine, Plan

_KEPT = 8
"""Batches whose costs are kept for other recompute of the same plans."""


class ArrayClock:
    """Times of plans of one model on one machine.

    Columns that differ only in recompute (`dataclasses.replace`) share most of their costs.

    Args:
        base: states sequence length, moments, clipping and stack of all plans.
        graph: the model's graph.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine) -> None:
        self.base, self.graph, self.machine = base, graph, machine
        self._prices = LayerPrices(base, graph, machine)
        self._sizes = LayerBytes(self._prices, base.batch.sequence)
        self._batches: deque[tuple[PlanBatch, LeastBytes]] = deque(maxlen=_KEPT)
        self._layout: Callable[[int, tuple[int, ...]], StageLayout] = cache(
            lambda pipeline, bounds: StageLayout(base, graph, pipeline, bounds)
        )

    def step_seconds(self, columns: PlanColumns) -> Floats:
        """Seconds of a step, `[plan]`.

        A step of many micro-batches is told by two shorter ones, and is no shorter than its passes.

        Raises:
            KeyError: the machine states no rate, or no link, that a plan needs.
        """
        end, batch = self.stage_ends(columns).end.max(axis=0), self._batch(columns)[0]
        seconds = end * batch.pace
        if columns.shape.repeats:
            seconds = np.maximum(seconds, self.least_seconds(columns))
        return np.asarray(seconds + self.machine.fixed_seconds)

    def seconds_by_machine(self, plan: Plan, machines: Sequence[Machine]) -> Floats:
        """Seconds of a plan's step on machines that differ in rates only, `[machine]`."""
        columns = PlanColumns.of((plan,))
        layout = self._layout(columns.shape.pipeline, columns.chunk_bounds)
        prices = [LayerPrices(self.base, self.graph, machine) for machine in machines]
        batch = MachinesBatch(
            [PlanBatch(columns, layout, *each) for each in zip(prices, machines, strict=True)]
        )
        self._batches.appendleft((batch, self._bytes(batch)))
        return self.step_seconds(batch.columns)

    def stage_ends(self, columns: PlanColumns) -> StageEnds:
        """When each stage ends a step, if all hosts are equally fast.

        A step of many micro-batches repeats itself: it is walked for two smaller numbers of them,
        a period apart, and each period more takes as long.

        Raises:
            KeyError: the machine states no rate, or no link, that a plan needs.
        """
        shape, (batch, _) = columns.shape, self._batch(columns)
        passes, clips = PassArrays(batch, columns), self.base.clip
        if not shape.repeats:
            return stage_ends(batch, passes, shape.microbatches, clips=clips)
        few, more = shape.settled, shape.settled + shape.period
        short, long = (stage_ends(batch, passes, each, clips=clips) for each in (few, more))
        return short.line(long, (columns.accumulation - few) / shape.period)

    def stage_seconds(self, columns: PlanColumns) -> tuple[Floats, Floats, Floats]:
        """Seconds of a micro-batch, each `[plan, stage]`.

        Returns:
            Forward passes; all passes; additions of a later micro-batch's gradients.
        """
        batch, _ = self._batch(columns)
        passes, by_stage = PassArrays(batch, columns), batch.layout.by_stage
        whole = passes.forward + passes.backward + passes.weight
        return by_stage(passes.forward).T, by_stage(whole).T, by_stage(batch.sums[1]).T

    def layer_seconds(
        self,
        config: LayerConfig,
        micros: Sequence[int],
        *,
        accumulates: bool,
        recomputes: bool = False,
    ) -> Floats:
        """Seconds of a micro-batch in each layer of one replica, `[3 or 4, micro, layer]`.

        They are those of the forward pass, of all passes, of additions of a later micro-batch's
        gradients, and of full recompute if that is asked for.

        Args:
            micros: sequences of each micro-batch.
            accumulates: whether a step has several micro-batches.
            recomputes: whether recompute is priced too.
        """
        prices, none = self._prices, (0,) * len(self._prices.layers)
        kinds: tuple[InstructionKind, ...] = ("forward", "backward", "recompute")
        exchange = ExchangeKey(1, 1, accumulates, 1)
        forward, backward, *again = (
            np.array(prices.passes(config, micros, exchange, PassWay(kind)))
            for kind in kinds[: 2 + recomputes]
        )
        sums = np.array([prices.sums(config, accumulates, each, none)[1] for each in micros])
        return np.array([forward, forward + backward, sums, *again])[..., prices.columns]

    def recompute_seconds(
        self, config: LayerConfig, micro: int, *, accumulates: bool, selects: bool
    ) -> Floats:
        """Seconds of a micro-batch's recompute in each layer, whole or selective, `[2, layer]`.

        Args:
            accumulates: whether a step has several micro-batches.
            selects: whether layers can be recomputed selectively; if not, it takes forever.
        """
        exchange, prices = ExchangeKey(1, 1, accumulates, 1), self._prices

        def seconds(kind: InstructionKind, *, selective: bool = False) -> Floats:
            return prices.passes(config, [micro], exchange, PassWay(kind, selective))[0]

        more = np.full(len(prices.layers), np.inf)
        if selects:
            kinds: tuple[InstructionKind, ...] = ("forward", "backward")
            changes = [seconds(each, selective=True) - seconds(each) for each in kinds]
            more = np.maximum(sum(changes), 0.0)
        return np.array([seconds("recompute"), more])[:, prices.columns]

    def activation_bytes(self, config: LayerConfig, micros: Sequence[int]) -> Floats:
        """`ActivationBytes` of micro-batches in each layer, `[micro, name, selective, layer]`."""
        return np.array(self._sizes.activations(config, micros))[..., self._prices.columns]

    def pass_seconds(self, plan: Plan) -> Floats:
        """Seconds of a micro-batch in each layer of a plan in phases, `[4, layer]`.

        They are those of its forward pass, of full recompute, and of backward passes with the
        addition of gradients: of the first micro-batch, which creates them, and of a later one.
        """
        config, pipeline, micro = LayerConfig.of(plan), plan.parallel.pipeline, plan.batch.micro
        prices, accumulates = self._prices, plan.batch.accumulation > 1
        exchange = ExchangeKey(plan.parallel.data, 1, accumulates, prices.between(pipeline))
        selective = np.zeros(self.graph.layers, bool)
        selective[list(selective_layers(plan))] = True

        def in_layers(way: PassWay) -> Floats:
            return prices.passes(config, [micro], exchange, way)[0][prices.columns]

        def seconds(kind: InstructionKind) -> Floats:
            plain = in_layers(PassWay(kind, False))
            if not selective.any():
                return plain
            return np.where(selective, in_layers(PassWay(kind, True)), plain)

        bounds = *(stage.first_layer for stage in plan.stages), self.graph.layers
        elements = self._layout(pipeline, bounds).shared(config.tensor)
        shared = tuple(elements.get(layer, 0) for layer in prices.layers)
        first, later = prices.sums(config, accumulates, micro, shared)[:, prices.columns]
        backward = seconds("backward")
        return np.array(
            [seconds("forward"), seconds("recompute"), backward + first, backward + later]
        )

    def message_seconds(self, plan: Plan) -> Floats:
        """Seconds of the message that takes each layer's output to another stage, `[layer]`."""
        config, parallel = LayerConfig.of(plan), plan.parallel
        costs = self._prices.message_cost(config, parallel.data, parallel.pipeline)
        nbytes = self._prices.message_bytes(config, plan.batch.micro)[self._prices.columns]
        return np.asarray(nbytes * costs[0] + costs[1])

    def exchange_seconds(self, plan: Plan) -> Floats:
        """Seconds of each layer's gather and reduction, and the part of that beside passes.

        The axes are `[3, layer]`.
        """
        degrees, data, pipeline = plan.sharding, plan.parallel.data, plan.parallel.pipeline
        sums, between = plan.batch.accumulation > 1, self._prices.between(pipeline)
        config, parts = LayerConfig.of(plan), (data, degrees.parameters, degrees.optimizer)
        price = self._prices.state(StateKey(config, sums, *parts, between))
        return np.array([price.gather, price.reduce, price.overlapped])[:, self._prices.columns]

    @property
    def columns(self) -> Ints:
        """Layers with equal numbers are alike, `[layer]`."""
        return self._prices.columns

    def least_seconds(self, columns: PlanColumns) -> Floats:
        """Lower bound on a step with any sharding and at least this recompute, `[plan]`.

        A stage has all its passes to do. Before its first one a micro-batch passes the stages
        before it, and after its last one the gradient passes them backward; only weight gradients
        of a split backward may come later than that.
        """
        batch, _ = self._batch(columns)
        stages, by_chunk = columns.shape.pipeline, batch.layout.by_chunk
        passes = PassArrays(batch, columns)
        forward, backward = by_chunk(passes.forward), by_chunk(passes.backward)
        first, later = map(by_chunk, batch.sums)
        each = forward + backward + by_chunk(passes.weight) + later
        each += (first - later) / columns.accumulation
        busy = columns.accumulation * batch.layout.over_chunks(each)
        busy[0] += columns.accumulation * batch.load
        ways = batch.messages[:stages] + forward[:stages]
        if not batch.splits:
            ways = ways + passes.returned[:stages] + backward[:stages]
        before = np.cumsum(ways, axis=0) - ways
        return np.asarray((busy + before).max(axis=0) * batch.pace)

    def least_bytes(self, columns: PlanColumns) -> Floats:
        """Device memory that each stage needs at least, `[plan, stage]`."""
        return self._batch(columns)[1].of(columns)

    def state_bytes(self, columns: PlanColumns) -> Floats:
        """Device memory that each stage needs whatever it recomputes, `[plan, stage]`."""
        return self._batch(columns)[1].state

    def _batch(self, columns: PlanColumns) -> tuple[PlanBatch, LeastBytes]:
        """The plans of some columns, with what is known about them already."""
        for known in self._batches:
            if known[0].serves(columns):
                return known
        layout = self._layout(columns.shape.pipeline, columns.chunk_bounds)
        batch = PlanBatch(columns, layout, self._prices, self.machine)
        self._batches.appendleft((batch, self._bytes(batch)))
        return self._batches[0]

    def _bytes(self, batch: PlanBatch) -> LeastBytes:
        count = LeastBytes if self.machine.stack is None else StackBytes
        return count(batch, self._sizes)
