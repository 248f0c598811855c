"""Random legal plans over stages, slices, replicas, shards, orders and phases, and their graphs."""

from itertools import pairwise

from hypothesis import strategies as st

from factories import AWAY, cut_graph, late_tied_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan
from windlass.schema.tensor_grid import TensorGrid

MACHINE = tiny_machine(host="1 GiB", devices=64)
GRAPHS = (
    tiny_graph(layers=4, tied=False),
    tiny_graph(layers=4, tied=True),
    late_tied_graph(before=1, between=2),
)
"""Six layers each; tied weights belong to no layer, to the first or to the third."""

CUT_GRAPHS = (*map(cut_graph, GRAPHS), cut_graph(tiny_graph(layers=4, tied=True, vocabulary=61)))
"""The same with their slices, and one whose slices have not all as many rows of the vocabulary."""

NEAR = (Offload(), Offload(optimizer="host"), Offload(activations="host"))


@st.composite
def pod_plans(draw: st.DrawFn) -> tuple[Graph, Plan]:
    """A graph of six layers and a plan for 1 to 3 stages, 1 to 4 replicas; 1, 2, 4, 2x2 slices."""
    tensor = draw(st.sampled_from([1, 2, 4, TensorGrid(2, 2)]))
    graph = draw(st.sampled_from(GRAPHS if tensor == 1 else CUT_GRAPHS))
    pipeline, replicas = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4]))
    optimizer = draw(st.sampled_from(_divisors(replicas)))
    weights = draw(st.sampled_from(_divisors(optimizer)))
    accumulation, interleave = draw(st.integers(1, 4)), 1
    far = draw(st.booleans())
    orders = ["gpipe", "1f1b"] if far else ["gpipe", "1f1b", "zero-bubble", "interleaved"]
    order = draw(st.sampled_from(orders if pipeline > 1 else orders[:3]))
    if order == "interleaved":
        interleave = draw(st.integers(2, 6 // pipeline))
        accumulation = pipeline * draw(st.integers(1, 2))
    activations = draw(st.sampled_from(["device", "host"]))
    home = AWAY.model_copy(update={"activations": activations})
    plan = tiny_plan(
        graph,
        MACHINE,
        pipeline=pipeline,
        tensor=tensor,
        data=replicas,
        sharding=(weights, optimizer),
        schedule=order,
        virtual_stages=interleave,
        offload=home if far else draw(st.sampled_from(NEAR)),
        stages=_phased(draw, pipeline) if far else _parted(draw, pipeline * interleave),
        accumulation=accumulation,
        recompute=draw(st.sampled_from(["none", "full"])),
        recompute_layers=draw(st.sampled_from([None, 1, 2])),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
        moments=draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        clip=draw(st.booleans()),
    )
    return graph, plan


def _parted(draw: st.DrawFn, parts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The six layers in so many parts of one phase each."""
    cuts = draw(st.sets(st.integers(1, 5), min_size=parts - 1, max_size=parts - 1))
    return tuple((pair,) for pair in pairwise([0, *sorted(cuts), 6]))


def _phased(draw: st.DrawFn, stages: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The six layers in more phases than stages, so many to each that all have at least one."""
    cuts = sorted(draw(st.sets(st.integers(1, 5), min_size=stages, max_size=5)))
    phases = tuple(pairwise([0, *cuts, 6]))
    most = len(phases) - 1
    ends = draw(st.sets(st.integers(1, most), min_size=stages - 1, max_size=stages - 1))
    return tuple(phases[a:b] for a, b in pairwise([0, *sorted(ends), len(phases)]))


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
