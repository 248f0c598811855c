"""Costs of many configurations and sharding options at once, against those of single plans."""

from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.cost.batched.config_keys import LayerConfig, ShardingOption, ShardingOptions
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.layer_ops import HELD
from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.instruction_time import InstructionCosts
from windlass.program.instruction import Instruction, InstructionKind
from windlass.program.memory.layer_sizes import (
    layer_kind_sizes,
    plan_state_sizes,
    sparse_gradient_bytes,
)
from windlass.program.memory.offloaded_bytes import offloaded_state_bytes
from windlass.schema.graph import Graph, Precision
from windlass.schema.machine import Curve, ExecutionModel, Link, Machine, OpRate, Point, Tier
from windlass.schema.plan import DEVICE_TIER, Offload, Plan, Recompute
from windlass.schema.tensor_grid import TensorGrid

ROUNDING = 1e-12
"""Relative error of sums in another order."""
close = partial(pytest.approx, rel=ROUNDING, abs=1e-30)

GRAPHS = tuple(
    sharded_graph(tiny_graph(layers=4, width=width, vocabulary=90, tied=tied))
    for width, tied in ((64, True), (256, False))
)
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
SEQUENCE = 32
FIRSTS = {"embedding": 0, "block": 1, "head": 5}
"""The first layer of each kind."""


def on(kind: str, rule: ExecutionModel, *, share: float, named: bool) -> Machine:
    """Hosts of 4 devices whose network cards are shared, with memory beyond the near tier."""
    tiny = tiny_machine(devices=4)
    curve = Curve(points=(Point(1e3, 1e8), Point(1e5, 1e9), Point(1e8, 3e9)))
    rates = tuple(OpRate(name="act", precision=each, curve=curve) for each in PRECISIONS)
    host = Tier(name="host", capacity_bytes=10**12, read=2e10, write=1e10, both=2.5e10)
    device = tiny.device.model_copy(
        update={
            "kind": kind,
            "tiers": (*tiny.device.tiers, host),
            "moving_share": share,
            "op_rates": rates if named else (),
            "mixed_norm_rate": 5e9 if named else None,
            "pass_seconds": 3e-5,
            "compiled_pass_seconds": 1e-5,
        }
    )
    outer = Link(name="network", joins=64, latency=1e-5, rate=3e8, shared_by=2)
    links = (*tiny.links, outer)
    return tiny.model_copy(
        update={"device": device, "execution_model": rule, "links": links, "hosts": 16}
    )


MACHINES = (
    on("cpu", "overlapping", share=0.0, named=True),
    on("cuda", "overlapping", share=0.0, named=False),
    on("other", "bulk-synchronous", share=0.1, named=True),
)

ONE = LayerConfig(1, "float32", False, 1, False, False)
places = st.integers(0, len(MACHINES) - 1)
tensors = st.sampled_from([1, 2, 4, TensorGrid(2, 2)])
ways = st.builds(
    LayerConfig,
    tensor=tensors,
    precision=st.sampled_from(PRECISIONS),
    compiled=st.booleans(),
    micro=st.sampled_from([1, 2, 3, 8]),
    accumulates=st.booleans(),
    pipelined=st.booleans(),
    replicas=st.sampled_from([1, 2, 4, 8]),
    offloads=st.booleans(),
)
shares = st.sampled_from([(w, o) for w in (1, 2, 4) for o in (1, 2, 4) if o % w == 0])
blocks = st.builds(
    lambda way, pairs, home: ShardingOptions(
        way.tensor,
        way.precision,
        way.accumulates,
        4,
        tuple(ShardingOption(*pair, home) for pair in pairs),
    ),
    ways,
    st.lists(shares, min_size=1, max_size=4),
    st.sampled_from([DEVICE_TIER, "host"]),
)


def plan_of(
    way: LayerConfig, graph: Graph, machine: Machine, recompute: Recompute = "none"
) -> Plan:
    """A plan of a setting, its last layer a stage of its own if there are several."""
    return tiny_plan(
        graph,
        machine,
        sequence=SEQUENCE,
        precision=way.precision,
        compiled=way.compiled,
        micro=way.micro,
        accumulation=2 if way.accumulates else 1,
        tensor=way.tensor,
        data=way.replicas,
        pipeline=1 + way.pipelined,
        recompute=recompute,
        offload=Offload(optimizer="host" if way.offloads else DEVICE_TIER),
        stages=(((0, 5),), ((5, 6),)) if way.pipelined else None,
        phases=None if way.pipelined else ((0, 6),),
    )


@settings(max_examples=60)
@given(places, places, st.lists(ways, min_size=1, max_size=5))
def test_batched_pass_times_equal_those_of_one_plan(
    graph: int, machine: int, some: list[LayerConfig]
):
    model, where = GRAPHS[graph % 2], MACHINES[machine]
    prices = LayerCosts(plan_of(some[0], model, where), model, where).passes(tuple(some))
    for row, way in enumerate(some):
        took = Took(plan_of(way, model, where), model, where)
        for kind, layer in enumerate(FIRSTS.values()):
            later, first = prices.sum_later[row, kind], prices.sum_first[row, kind]
            assert prices.forward[row, kind] == close(took.of("forward", layer))
            assert prices.backward[row, kind] + first == close(took.of("backward", layer, 0))
            assert prices.backward[row, kind] + later == close(took.of("backward", layer))
            inputs, weights = prices.backward_input[row, kind], prices.backward_weight[row, kind]
            assert inputs == close(took.of("backward_input", layer))
            assert weights + later == close(took.of("backward_weight", layer))
        assert prices.load_seconds[row] == close(took.of("load_batch", None))
        if way.pipelined and prices.lent[row]:
            assert prices.taking[row] == close(took.of("accumulate_tied_grads", 5))


@given(places, st.lists(ways, min_size=1, max_size=5), st.integers(1, 9))
def test_batched_pass_sizes_equal_those_of_one_plan(
    place: int, some: list[LayerConfig], micros: int
):
    graph, machine = GRAPHS[place % 2], MACHINES[0]
    chain = LayerCosts(plan_of(some[0], graph, machine), graph, machine)
    prices = chain.passes(tuple(some))
    for row, way in enumerate(some):
        plan = plan_of(way, graph, machine)
        batch = plan.batch.model_copy(update={"accumulation": micros})
        for kind, name in enumerate(FIRSTS):
            layer = graph.shard(way.tensor).kinds[name]
            sizes = layer_kind_sizes(plan, layer)
            assert prices.held[row, :, kind].tolist() == [getattr(sizes, each) for each in HELD]
            rows = sparse_gradient_bytes(plan.model_copy(update={"batch": batch}), layer)
            assert chain.rows(way.tensor, way.micro * (micros - 1))[kind] == rows


@given(places, ways)
def test_batched_selective_layers_equal_those_of_one_plan(place: int, way: LayerConfig):
    graph, machine = GRAPHS[1], MACHINES[place]
    way = way._replace(tensor=1, compiled=False)
    plan = plan_of(way, graph, machine, recompute="selective")
    chain = LayerCosts(plan, graph, machine)
    prices, block = chain.passes((way,)), chain.variants[1]
    took = Took(plan, graph, machine).of("backward", 1)
    assert prices.backward[0, block] + prices.sum_later[0, block] == close(took)
    sizes = layer_kind_sizes(plan, graph.kinds["block"], selective=True)
    assert prices.held[0, :, block].tolist() == [getattr(sizes, each) for each in HELD]


@settings(max_examples=60)
@given(places, places, st.lists(blocks, min_size=1, max_size=4), st.booleans())
def test_batched_state_costs_equal_those_of_one_plan(
    graph_place: int, machine_place: int, some: list[ShardingOptions], clip: bool
):
    graph, machine = GRAPHS[graph_place % 2], MACHINES[machine_place]
    base = plan_of(ONE, graph, machine).model_copy(update={"clip": clip, "moments": "int8"})
    prices = LayerCosts(base, graph, machine).states(some)
    pairs = [(block, share) for block in some for share in block.options]
    for row, (block, share) in enumerate(pairs):
        plan = _shared(base, block, share)
        states, links = plan_state_sizes(plan, graph), CommunicationCosts(plan, graph, machine)
        took = Took(plan, graph, machine)
        for kind, layer in enumerate(FIRSTS.values()):
            each, reduce = states[layer], took.of("reduce_grads", layer)
            beside = links.overlapped_seconds(Instruction("reduce_grads", layer))
            spread = (
                took.of("all_gather_params", layer) if share.optimizer > share.parameters else 0.0
            )
            far = offloaded_state_bytes(plan, each) if share.optimizer_tier != DEVICE_TIER else 0
            assert prices.held[row, kind] == each.weight_shard + (0 if far else each.optimizer)
            assert prices.far[row, kind] == far
            assert prices.norm_bytes[row, kind] == each.gradient_shard
            if share.parameters > 1:
                assert prices.gather[row, kind] == close(took.of("unshard_weights", layer))
            assert prices.reduce[row, kind] == close(reduce)
            assert prices.waited[row, kind] == close(reduce - beside)
            if share.optimizer_tier == DEVICE_TIER:
                assert prices.after[row, kind] == close(took.of("update", layer) + spread)


class Took:
    """Seconds of the instructions of one plan, as the clock has them."""

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self._costs = InstructionCosts(plan, graph, machine)

    def of(self, kind: InstructionKind, layer: int | None, micro: int = 1) -> float:
        instruction = Instruction(kind, layer, micro)
        exchanged = self._costs.communication_seconds(instruction)
        if kind == "accumulate_tied_grads":
            exchanged = 0.0
        return self._costs.terms(instruction).total + exchanged


def _shared(base: Plan, block: ShardingOptions, share: ShardingOption) -> Plan:
    way = ONE._replace(
        tensor=block.tensor,
        precision=block.precision,
        accumulates=block.accumulates,
        replicas=block.replicas,
    )
    plan = base.model_copy(
        update={
            "parallel": base.parallel.model_copy(
                update={"tensor": way.tensor, "data": way.replicas}
            ),
            "precision": way.precision,
            "offload": Offload(optimizer=share.optimizer_tier),
            "batch": base.batch.model_copy(update={"accumulation": 2 if way.accumulates else 1}),
        }
    )
    sharding = plan.sharding.model_copy(
        update={"parameters": share.parameters, "optimizer": share.optimizer}
    )
    return plan.model_copy(update={"sharding": sharding})
