"""Array clock: the step time of many plans at once, from the costs of the event simulator."""

from collections.abc import Sequence

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.clock.batch_seconds import BatchSeconds
from windlass.cost.clock.layer_bytes import LayerBytes
from windlass.cost.clock.layer_prices import LayerPrices
from windlass.cost.clock.least_bytes import least_bytes
from windlass.cost.clock.plan_columns import LayerConfig, PlanColumns
from windlass.cost.clock.step_walk import step_end
from windlass.schema import Graph, Machine, Plan


class ArrayClock:
    """Times of plans of one model on one machine.

    Args:
        base: states sequence length, moments, clipping and stack of all plans.
        graph: the model's graph.
        machine: the machine that they run on.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine) -> None:
        self.base, self.graph, self.machine = base, graph, machine
        self._prices = LayerPrices(base, graph, machine)
        self._sizes = LayerBytes(self._prices, base.batch.sequence)

    def step_seconds(self, columns: PlanColumns) -> Floats:
        """Seconds of a step, `[plan]`.

        A step of many micro-batches repeats itself: it is walked for two smaller numbers of them,
        a period apart, and each period more takes as long.

        Raises:
            KeyError: the machine states no rate, or no link, that a plan needs.
        """
        batch = BatchSeconds(columns, self._prices, self.graph, self.machine)
        shape = columns.shape
        if not shape.repeats:
            return step_end(batch, shape.microbatches, clips=self.base.clip) * batch.pace
        few, more = shape.settled, shape.settled + shape.period
        short, long = (step_end(batch, each, clips=self.base.clip) for each in (few, more))
        times = (columns.accumulation - few) / shape.period
        return np.asarray((short + times * (long - short)) * batch.pace)

    def stage_seconds(self, columns: PlanColumns) -> Floats:
        """Seconds of all passes of a micro-batch, `[plan, stage]`."""
        batch = BatchSeconds(columns, self._prices, self.graph, self.machine)
        passes = batch.passes
        return batch.by_stage(passes.forward + passes.backward + passes.weight).T

    def least_seconds(self, columns: PlanColumns) -> Floats:
        """Lower bound on a step with any sharding and at least this recompute, `[plan]`.

        A stage has all its passes to do. Before its first one a micro-batch passes the stages
        before it, and after its last one the gradient passes them backward; only weight gradients
        of a split backward may come later than that.
        """
        batch = BatchSeconds(columns, self._prices, self.graph, self.machine)
        stages, passes = columns.shape.pipeline, batch.passes
        backward = batch.by_chunk(passes.backward)[:stages]
        sums = passes.later + (passes.first - passes.later) / columns.accumulation
        each = passes.forward + passes.backward + passes.weight + sums
        busy = columns.accumulation * batch.by_stage(each)
        busy[0] += columns.accumulation * batch.load
        ways = batch.messages[:stages] + batch.by_chunk(passes.forward)[:stages]
        if not batch.splits:
            ways = ways + batch.messages[:stages] + backward
        before = np.cumsum(ways, axis=0) - ways
        return np.asarray((busy + before).max(axis=0) * batch.pace)

    def least_bytes(self, columns: PlanColumns) -> Floats:
        """Device memory that each stage needs at least, `[plan, stage]`."""
        batch = BatchSeconds(columns, self._prices, self.graph, self.machine)
        return least_bytes(batch, self._sizes, self.base.batch.sequence)

    def layer_seconds(self, config: LayerConfig, micros: Sequence[int]) -> Floats:
        """Least seconds of both passes of each layer, without recompute, `[micro, layer]`.

        Communication is left out, since it may overlap.

        Args:
            config: how layers compute.
            micros: sequences of a micro-batch.

        Raises:
            KeyError: the machine states no rate, or the graph no cost, for the configuration.
        """
        return self._prices.least_seconds(config, tuple(micros))
