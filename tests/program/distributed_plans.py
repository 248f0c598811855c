"""Random valid plans over parallel and sharding degrees, schedules and phases; their graphs."""

from itertools import pairwise

from hypothesis import strategies as st

from factories import (
    HOST_OFFLOAD,
    expert_graph,
    late_tied_graph,
    sharded_graph,
    tiny_graph,
    tiny_machine,
    tiny_plan,
)
from program.frozen_graph import frozen_graph
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan
from windlass.schema.tensor_grid import TensorGrid

MACHINE = tiny_machine(host="1 GiB", devices=64)
GRAPHS = (
    tiny_graph(layers=4, tied=False),
    tiny_graph(layers=4, tied=True),
    late_tied_graph(before=1, between=2),
    expert_graph(layers=4),
)
"""Graphs of six layers: without tied weights, with tied weights of the first or third layer, and
with twelve experts in each block."""

SHARDED_GRAPHS = (
    *map(sharded_graph, GRAPHS[:3]),
    sharded_graph(tiny_graph(layers=4, tied=True, vocabulary=61)),
)
"""The same with tensor-parallel shards, and one with an uneven vocabulary."""

FROZEN = {
    (id(graph), front): frozen_graph(graph, front)
    for graph in (*GRAPHS, *SHARDED_GRAPHS)
    for front in (1, 3)
}
"""Each of them with so many layers frozen, made once: a graph's fingerprint takes milliseconds."""

RESIDENT_OFFLOADS = (Offload(), Offload(optimizer="host"), Offload(activations="host"))


@st.composite
def distributed_plans(draw: st.DrawFn, *, trained: bool = False) -> tuple[Graph, Plan]:
    """A graph of six layers and a plan: pipeline 1 to 3, data 1 to 4, tensor 1, 2, 4 or 2x2.

    In half of the plans the first layers are frozen, unless all are `trained`. Replicas divide
    experts where there are any.
    """
    tensor = draw(st.sampled_from([1, 2, 4, TensorGrid(2, 2)]))
    graph = draw(st.sampled_from(GRAPHS if tensor == 1 else SHARDED_GRAPHS))
    pipeline, replicas = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4]))
    optimizer = draw(st.sampled_from(_divisors(replicas)))
    weights = draw(st.sampled_from(_divisors(optimizer)))
    accumulation, virtual_stages = draw(st.integers(1, 4)), 1
    expert = draw(st.sampled_from(_divisors(replicas))) if graph.experts else 1
    offloads = draw(st.booleans())
    schedules = ["gpipe", "1f1b"] if offloads else ["gpipe", "1f1b", "zero-bubble"]
    can_freeze = not trained
    if can_freeze and (front := draw(st.sampled_from([0, 0, 1, 3]))):
        graph = FROZEN[id(graph), front]
    schedules += ["interleaved"] if pipeline > 1 else []
    schedule = draw(st.sampled_from(schedules))
    if schedule == "interleaved":
        virtual_stages = draw(st.integers(2, 6 // pipeline))
        accumulation = draw(st.integers(1, 7)) if offloads else pipeline * draw(st.integers(1, 2))
    chunks = pipeline * virtual_stages
    takes_turns = offloads and chunks < 6 and (virtual_stages == 1 or draw(st.booleans()))
    activations = draw(st.sampled_from(["device", "host"]))
    offload = HOST_OFFLOAD.model_copy(update={"activations": activations})
    plan = tiny_plan(
        graph,
        MACHINE,
        pipeline=pipeline,
        tensor=tensor,
        data=replicas,
        expert=expert,
        sharding=(weights, optimizer),
        schedule=schedule,
        virtual_stages=virtual_stages,
        offload=offload if offloads else draw(st.sampled_from(RESIDENT_OFFLOADS)),
        stages=_phased(draw, chunks) if takes_turns else _chunks(draw, chunks),
        accumulation=accumulation,
        recompute=draw(st.sampled_from(["none", "full"])),
        recompute_layers=draw(st.sampled_from([None, 1, 2])),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
        moments=draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        clip=draw(st.booleans()),
    )
    return graph, plan


def _chunks(draw: st.DrawFn, parts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The six layers in so many model chunks of one phase each."""
    ends = draw(st.sets(st.integers(1, 5), min_size=parts - 1, max_size=parts - 1))
    return tuple((pair,) for pair in pairwise([0, *sorted(ends), 6]))


def _phased(draw: st.DrawFn, stages: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The six layers in more phases than stages, with at least one phase in each stage."""
    ends = sorted(draw(st.sets(st.integers(1, 5), min_size=stages, max_size=5)))
    phases = tuple(pairwise([0, *ends, 6]))
    most = len(phases) - 1
    ends = draw(st.sets(st.integers(1, most), min_size=stages - 1, max_size=stages - 1))
    return tuple(phases[a:b] for a, b in pairwise([0, *sorted(ends), len(phases)]))


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
