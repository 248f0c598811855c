"""Random valid plans with offload tiers, each with its graph."""

from itertools import pairwise

from hypothesis import strategies as st

from factories import late_tied_graph, tiny_graph, tiny_machine, tiny_plan
from program.frozen_graph import frozen_graph
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan

MACHINE = tiny_machine(host="1 GiB")

trained_graphs = st.one_of(
    st.builds(tiny_graph, layers=st.integers(0, 6), tied=st.booleans()),
    st.builds(late_tied_graph, before=st.integers(0, 3), between=st.integers(0, 3)),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph, in one of three the first layers frozen, and all but the last one at most."""
    graph = draw(trained_graphs)
    front = draw(st.sampled_from([0, 0, draw(st.integers(0, graph.layers - 2))]))
    return frozen_graph(graph, front) if front else graph


@st.composite
def offloaded_plans(
    draw: st.DrawFn, *, parameters: bool | None = None, trained: bool = False
) -> tuple[Graph, Plan]:
    """A graph and a plan for it.

    Args:
        draw: hypothesis draws with it.
        parameters: whether parameters are offloaded; None draws it.
        trained: whether no layer is frozen.
    """
    graph = draw(trained_graphs if trained else graphs())
    tiers = st.sampled_from(["host", "disk"])
    offloads_parameters = draw(st.booleans()) if parameters is None else parameters
    activations = draw(st.sampled_from(["device", "host"]))
    if offloads_parameters:
        offload = Offload(
            parameters=draw(tiers),
            gradients=draw(tiers),
            optimizer=draw(tiers),
            activations=activations,
        )
        ends = draw(st.sets(st.integers(1, graph.layers - 1), min_size=1))
    else:
        optimizer = (
            draw(tiers) if activations == "device" else draw(st.sampled_from(["device", "host"]))
        )
        offload, ends = Offload(optimizer=optimizer, activations=activations), set[int]()
    plan = tiny_plan(
        graph,
        MACHINE,
        offload=offload,
        phases=tuple(pairwise([0, *sorted(ends), graph.layers])),
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
