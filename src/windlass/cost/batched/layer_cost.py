"""Costs of layers that the batched cost model adds up, as arrays over layer kinds.

A pass depends on tensor parallelism, computation and micro-batch size (`LayerConfig`); weights,
gradients, optimizer state and their collectives depend on sharding (`ShardingOptions`). Many of
both are priced at once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.config_keys import LayerConfig, ShardingOptions, priced_plan
from windlass.cost.batched.pass_time import PassCostModel, PassCosts
from windlass.cost.batched.state_cost import StateCostModel, StateCosts
from windlass.cost.op_time import rates_at
from windlass.cost.optimizer_time import norm_rate
from windlass.cost.ring_bandwidth import RingCosts, message_cost
from windlass.program import tied_owner_layers
from windlass.schema import Graph, LayerKind, Machine, Plan, Precision, Recompute


class LayerCosts:
    """Costs of the layers of a graph on a machine.

    Args:
        base: states sequence length, moments and clipping; the rest of it does not matter.
        graph: graph of the layers.
        machine: the machine that they run on.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine) -> None:
        self.base, self.graph, self.machine = base, graph, machine
        names = [kind.name for kind in graph.layer_kinds()]
        own = tuple(dict.fromkeys(names))
        self.kind_of_layer: Ints = np.array([own.index(name) for name in names])
        """Index of the layer's kind, `[layer]`."""
        self.layers = len(names)
        self.tied = tuple(
            (layer, owner)
            for layer, owned in enumerate(tied_owner_layers(graph))
            for owner in owned
            if owner != layer
        )
        """Layers with tied weights, each with the layer that owns them."""
        rings = RingCosts(machine.links)
        self._prices = PassCostModel(base, graph, machine, self.tied, rings)
        self.passes: Callable[[tuple[LayerConfig, ...]], PassCosts] = cache(self._prices.of)
        """Costs of passes, `[config, ...]`; as in `PassCostModel.of`."""
        self.rows: Callable[[int, int], Floats] = self._prices.ops.rows
        """Bytes of embedding rows, by tensor degree and sequences; as in `ChainOps.rows`."""
        self.states: Callable[[Sequence[ShardingOptions]], StateCosts] = StateCostModel(
            base, graph, machine, rings
        ).of
        """Costs of state, `[option, ...]`; as in `StateCostModel.of`."""

    @cached_property
    def variants(self) -> Ints:
        """Index of the selectively recomputed variant of each kind, `[layer kind]`.

        Variants are numbered after all kinds; a kind without a variant has its own index.
        """
        ops = self._prices.ops
        numbers = np.arange(len(ops.names))
        numbers[list(ops.selective)] = len(ops.names) + np.arange(len(ops.selective))
        return numbers

    @cached_property
    def numbered(self) -> tuple[LayerKind, ...]:
        """The layer kind behind each index, unsharded, `variants` included."""
        ops = self._prices.ops
        return tuple(ops.kinds(1)[each.name] for each in ops.variants)

    def kinds_as(self, modes: Sequence[Recompute]) -> Ints:
        """Index of the kind of each layer, recomputed in the given modes, `[layer]`."""
        chosen = np.array(modes) == "selective"
        return np.asarray(np.where(chosen, self.variants[self.kind_of_layer], self.kind_of_layer))

    def message_ways(self, settings: Sequence[LayerConfig], pipeline: int) -> tuple[Floats, Floats]:
        """Seconds of a byte to another stage, and of a message apart from its bytes, `[config]`."""
        links = self.machine.links
        if not links or pipeline == 1:
            return np.zeros(len(settings)), np.zeros(len(settings))
        stages = [each.replicas * int(each.tensor) for each in settings]
        ways = {
            devices: message_cost(links, pipeline * devices, active_devices=devices)
            for devices in set(stages)
        }
        each_byte, each_message = np.array([ways[devices] for devices in stages]).T
        return each_byte, each_message

    def norm_rates(self, blocks: Sequence[ShardingOptions], nbytes: Floats) -> Floats:
        """Bytes/s of the gradient norm over these bytes, `[option, ...]`."""
        known: dict[tuple[Precision, bool, bool], int] = {}
        alike = [
            known.setdefault((block.precision, block.accumulates, block.offloads), len(known))
            for block in blocks
        ]
        alike_of_pair = np.repeat(alike, [len(block.options) for block in blocks])
        found = np.empty_like(nbytes)
        for (precision, sums, moves), place in known.items():
            rows = alike_of_pair == place
            device = self.machine.device.effective(offloads=moves)
            fixed = norm_rate(priced_plan(self.base, precision, accumulates=sums), device)
            found[rows] = fixed or rates_at(device.traffic, nbytes[rows])
        return found

    def kinds(self, tensor: int) -> Mapping[str, LayerKind]:
        """The layer kinds, whole or as one of t tensor-parallel shards."""
        return self._prices.ops.kinds(tensor)
