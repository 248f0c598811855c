"""Random legal plans with homes beyond the near tier, each with its graph."""

from itertools import pairwise

from hypothesis import strategies as st

from factories import late_tied_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan

MACHINE = tiny_machine(host="1 GiB")

graphs = st.one_of(
    st.builds(tiny_graph, layers=st.integers(0, 6), tied=st.booleans()),
    st.builds(late_tied_graph, before=st.integers(0, 3), between=st.integers(0, 3)),
)


@st.composite
def streamed_plans(draw: st.DrawFn, *, weights: bool | None = None) -> tuple[Graph, Plan]:
    """A graph and a plan for it.

    Args:
        draw: hypothesis's.
        weights: whether the weights are far; None draws it.
    """
    graph = draw(graphs)
    far = st.sampled_from(["host", "disk"])
    parted = draw(st.booleans()) if weights is None else weights
    activations = draw(st.sampled_from(["device", "host"]))
    if parted:
        home = Offload(
            parameters=draw(far), gradients=draw(far), optimizer=draw(far), activations=activations
        )
        cuts = draw(st.sets(st.integers(1, graph.layers - 1), min_size=1))
    else:
        optimizer = (
            draw(far) if activations == "device" else draw(st.sampled_from(["device", "host"]))
        )
        home, cuts = Offload(optimizer=optimizer, activations=activations), set[int]()
    plan = tiny_plan(
        graph,
        MACHINE,
        offload=home,
        phases=tuple(pairwise([0, *sorted(cuts), graph.layers])),
        micro=draw(st.integers(1, 2)),
        accumulation=draw(st.integers(1, 4)),
        sequence=draw(st.integers(1, 16)),
        recompute=draw(st.sampled_from(["none", "full"])),
        recompute_layers=draw(st.sampled_from([None, 1, 2])),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
        clip=draw(st.booleans()),
        moments=draw(st.sampled_from(["float32", "bfloat16", "int8"])),
    )
    return graph, plan
