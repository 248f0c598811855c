"""Random legal plans of tiny models whose layers stay on their device."""

import random
from itertools import pairwise

from factories import (
    catalog_graph,
    expert_graph,
    late_tied_graph,
    sharded_graph,
    tiny_graph,
    tiny_machine,
    tiny_plan,
)
from program.frozen_graph import frozen_graph
from windlass.program.activation_checkpointing import with_recompute
from windlass.program.layer_mode_errors import selective_recompute_errors
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine, Tier
from windlass.schema.machine.stack import Stack
from windlass.schema.plan import Offload, Plan
from windlass.schema.tensor_grid import TensorGrid

GRAPHS = tuple(
    sharded_graph(graph)
    for graph in (
        tiny_graph(layers=10, width=256, vocabulary=500, tied=False),
        tiny_graph(layers=10, width=256, vocabulary=500, tied=True),
        tiny_graph(layers=7, width=64, vocabulary=5000, tied=True, sparse=True),
        late_tied_graph(before=3, between=4),
    )
)
FROZEN_GRAPHS = tuple(
    frozen_graph(graph, front) for graph in GRAPHS[:2] for front in (1, 4, graph.layers - 1)
)
"""Graphs whose first layers are frozen, so that no backward pass comes down to them."""
SLOW_LINKS = tiny_machine(devices=64, runtime=1000, compiler=20_000)
"""A message takes as long as a pass of a layer."""
FAST_LINKS = SLOW_LINKS.model_copy(
    update={"links": (SLOW_LINKS.links[0].model_copy(update={"rate": 2e10, "latency": 1e-5}),)}
)
OVERLAPPING = tuple(
    machine.model_copy(update={"device": machine.device.model_copy(update={"kind": "cuda"})})
    for machine in (FAST_LINKS, SLOW_LINKS)
)
"""The same machines with overlapping gradient reduction."""
BULK_SYNCHRONOUS = FAST_LINKS.model_copy(update={"execution_model": "bulk-synchronous"})


def with_host(machine: Machine, rate: float, **device: object) -> Machine:
    """The machine with memory of its hosts, so many bytes/s away."""
    host = Tier(name="host", capacity_bytes=10**12, read=rate, write=rate, both=1.5 * rate)
    tiers = (*machine.device.tiers, host)
    changed = machine.device.model_copy(update={"tiers": tiers, **device})
    return machine.model_copy(update={"device": changed})


OFFLOADING = (
    with_host(FAST_LINKS, 2e10),
    with_host(FAST_LINKS, 2e9),
    with_host(FAST_LINKS, 2e10, kind="other"),
    with_host(FAST_LINKS, 2e9, kind="other"),
    with_host(BULK_SYNCHRONOUS, 2e9, kind="other", moving_share=0.1),
    with_host(BULK_SYNCHRONOUS, 2e9, kind="other"),
)
"""Tiers that updates wait for and such that they do not; `other` devices do not update with the
cores that compute."""
STACK = Stack(
    name="made-up",
    about="all constants that change what overlaps",
    overlaps_reduction=True,
    overlaps_gather=True,
    tensor_overlap=0.3,
    launch_seconds=1e-6,
    pair_launches=0.2,
    collective_seconds=1e-5,
    message_seconds=2e-5,
    gather_exposed=0.2,
    products=0.9,
    traffic=0.8,
)
STACKS = (
    STACK,
    STACK.model_copy(update={"overlaps_reduction": False, "overlaps_gather": False}),
    STACK.model_copy(update={"stages_adjacent": True}),
)
MACHINES = (FAST_LINKS, SLOW_LINKS, *OVERLAPPING, BULK_SYNCHRONOUS, *OFFLOADING)


EXPERTS = (
    expert_graph(layers=10, width=64, experts=8), expert_graph(layers=7, experts=4),
    frozen_graph(expert_graph(layers=7, experts=4), 3),
    catalog_graph("moe-tiny", 2, TensorGrid(1, 2), layers=6, experts=4, vocabulary=500),
)  # fmt: skip
"""Graphs whose experts replicas can divide; ranks can share the last one."""


def draw_with_experts(chance: random.Random, graph: Graph, machine: Machine) -> Plan:
    """A random plan whose replicas divide experts, sharded or not, offloaded or not."""
    replicas = chance.choice([2, 4, 8])
    expert = chance.choice([each for each in divisors(replicas) if 1 < each <= graph.experts[0]])
    context = chance.choice([1, 1, *divisors(replicas)])  # powers of two divide each other
    optimizer = chance.choice(divisors(replicas))
    plan = tiny_plan(
        graph, machine, pipeline=chance.choice([1, 2, 3]), data=replicas // context,
        context=context, expert=expert,
        tensor=chance.choice([1, *graph.tensor_shards]),
        sharding=(chance.choice(divisors(optimizer)), optimizer), micro=chance.choice([1, 2]),
        accumulation=chance.choice([1, 2, 5]), sequence=32, clip=chance.random() < 0.5,
        precision=chance.choice(["float32", "bfloat16"]),
        schedule=chance.choice(["1f1b", "gpipe", "zero-bubble"]),
        offload=Offload(optimizer=chance.choice(machine.device.tiers).name),
    )  # fmt: skip
    if graph.tensor_shards and plan.parallel.schedule != "zero-bubble":
        plan = plan.model_copy(update={"compile": chance.random() < 0.5})
    full = [chance.choice([0, 1, 2]) for _ in plan.stages]
    if any(selective_recompute_errors(plan, graph)):
        return with_recompute(plan, full)
    return with_recompute(plan, full, [chance.choice([0, 1, 5]) for _ in plan.stages])


def draw(chance: random.Random, graph: Graph, machine: Machine, *, accumulation: int = 0) -> Plan:
    """A random plan; optimizer state lives in the last tier, or on the device.

    Args:
        chance: source of randomness.
        graph: the model.
        machine: the machine.
        accumulation: micro-batches of a step, rounded up as the schedule asks; 0 draws them.
    """
    layers = graph.layers
    pipeline = chance.choice([1, 2, 3, 4, 5, 6, 8])
    data = chance.choice([1, 2, 4])
    optimizer = chance.choice(divisors(data))
    schedule, chunks = chance.choice(["gpipe", "1f1b", "1f1b", "zero-bubble", "interleaved"]), 1
    micros = accumulation or chance.choice([1, 2, 3, 4, 7, 16, 40])
    if schedule == "interleaved":
        schedule = "1f1b" if pipeline == 1 or 2 * pipeline > layers else schedule
    if schedule == "interleaved":
        chunks = chance.choice([each for each in (2, 3) if each * pipeline <= layers])
        micros = -(-micros // pipeline) * pipeline
    count = pipeline * chunks
    ends = [0, *sorted(chance.sample(range(1, layers), count - 1)), layers]
    plan = tiny_plan(
        graph,
        machine,
        pipeline=pipeline,
        tensor=chance.choice([1, 2, 4]),
        data=data,
        sharding=(chance.choice(divisors(optimizer)), optimizer),
        schedule=schedule,
        virtual_stages=chunks,
        accumulation=micros,
        micro=chance.choice([1, 2, 4]),
        sequence=32,
        precision=chance.choice(["float32", "bfloat16"]),
        compiled=chance.random() < 0.5 and schedule != "zero-bubble",
        moments=chance.choice(["float32", "int8"]),
        clip=chance.random() < 0.5,
        offload=Offload(optimizer=chance.choice(machine.device.tiers).name),
        stages=tuple((bounds,) for bounds in pairwise(ends)),
    )
    full = [chance.choice([0, 0, 1, 2, layers]) for _ in range(count)]
    if any(selective_recompute_errors(plan, graph)):
        return with_recompute(plan, full)
    return with_recompute(plan, full, [chance.choice([0, 1, layers]) for _ in range(count)])


def draw_on_stack(chance: random.Random, graph: Graph, machine: Machine) -> tuple[Plan, Machine]:
    """A random plan under a stack, which may divide sequences, or gather weights in each pass.

    Windlass's own, which is None, gathers no weights in passes.
    """
    stack = chance.choice((None, *STACKS))
    machine = machine.model_copy(update={"stack": stack})
    plan = draw(chance, graph, machine)
    sharding, parallel = plan.sharding, plan.parallel
    if stack is not None and sharding.parameters > 1 and chance.random() < 0.7:
        sharding = sharding.model_copy(update={"reshard": True})
    if chance.random() < 0.4:
        parallel = parallel.model_copy(update={"context": 2})
    return plan.model_copy(update={"sharding": sharding, "parallel": parallel}), machine


def divisors(number: int) -> list[int]:
    """All divisors of a number."""
    return [size for size in range(1, number + 1) if number % size == 0]
