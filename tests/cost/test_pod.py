import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from program.pod_plans import MACHINE, pod_plans
from windlass.cost.links import Links
from windlass.cost.predict import predict
from windlass.cost.simulate import simulate
from windlass.program.instruction import Instruction
from windlass.program.lower import lower
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan

GRAPH = tiny_graph(layers=2, tied=False)
SQUARE_BYTES = 32 * 32 * 4


def linked(rate: float) -> Machine:
    """All devices on one link of so many bytes/s."""
    (link,) = MACHINE.links
    return MACHINE.model_copy(update={"links": (link.model_copy(update={"rate": rate}),)})


@given(drawn=pod_plans())
def test_every_plan_of_a_pod_is_timed_and_its_kinds_sum_to_the_step(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    programs = lower(plan, graph)
    told = predict(plan, graph, MACHINE, programs)
    assert sum(told.by_kind.values()) == pytest.approx(told.step_seconds)
    if plan.cut.devices > 1:
        assert sum(told.by_term.values()) == pytest.approx(told.step_seconds)
    for lane in simulate(plan, graph, MACHINE, programs).lanes:
        assert len(lane.starts) == len(programs[lane.device].instructions)
        assert all(end >= start for start, end in zip(lane.starts, lane.ends, strict=True))


@given(drawn=pod_plans(), rate=st.floats(1e6, 1e12), times=st.floats(1, 100))
def test_a_slower_link_never_makes_a_step_shorter(
    drawn: tuple[Graph, Plan], rate: float, times: float
):
    graph, plan = drawn
    fast, slow = (predict(plan, graph, linked(each)) for each in (rate, rate / times))
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sharding", "kind", "sent", "hops"),
    [
        # Four rings of two lie side by side among eight replicas, and share one link.
        ((2, 2), "gather", 4 * SQUARE_BYTES / 2, 1),
        ((8, 8), "gather", 7 * SQUARE_BYTES / 8, 7),
        ((2, 8), "spread", 2 * 3 * SQUARE_BYTES / 8, 3),
        ((1, 1), "reduce", 2 * 7 * SQUARE_BYTES / 8, 14),
        # Scattered among four, then summed over the two blocks by four rings at once.
        ((1, 4), "reduce", 2 * 3 * SQUARE_BYTES / 4 + 4 * 2 * SQUARE_BYTES / 4 / 2, 3 + 2),
    ],
)
def test_collectives_take_what_rings_take(
    sharding: tuple[int, int], kind: str, sent: float, hops: int
):
    machine = tiny_machine(devices=8)
    plan = tiny_plan(GRAPH, machine, replicas=8, sharding=sharding)
    (link,) = machine.links
    seconds = Links(plan, GRAPH, machine).seconds(Instruction(kind, 1))  # type: ignore[arg-type]
    assert seconds == pytest.approx(sent / link.rate + hops * link.latency)


def test_a_gather_holds_up_its_group_until_the_last_is_there():
    plan = tiny_plan(GRAPH, MACHINE, replicas=2, sharding=(2, 2), pipeline=2)
    lanes = simulate(plan, GRAPH, MACHINE, lower(plan, GRAPH)).lanes
    for first, second in (lanes[:2], lanes[2:]):
        ends = [
            [end for kind, end in zip(lane.kinds, lane.ends, strict=True) if kind == "gather"]
            for lane in (first, second)
        ]
        assert ends[0] == ends[1]
        assert len(ends[0]) == 2


def test_borrowed_weights_come_while_the_first_stage_computes():
    """Lent at the begin of the step, they are there before the last stage has anything to do."""
    graph = tiny_graph(layers=6, tied=True)
    machine = linked(1e11)
    tied, apart = (
        predict(tiny_plan(each, machine, pipeline=2, micro=32, sequence=64), each, machine)
        for each in (graph, tiny_graph(layers=6, tied=False))
    )
    (link,) = machine.links
    handed = 2 * (link.latency + 64 * 32 * 4 / link.rate)
    assert tied.step_seconds < apart.step_seconds + handed
