"""The plan to queue: what it leaves of memory, and when it is the proved fastest one."""

import pytest

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.planner.choose import choose_plan
from windlass.planner.plan_to_queue import plan_to_queue
from windlass.planner.result import PlanningResult
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema.machine import Machine
from windlass.schema.request import ResolvedRequest

GRAPH = sharded_graph(tiny_graph(layers=4, width=64, vocabulary=128), (2,))
TIMES = ("train.batch=8", "train.sequence=32", "train.steps=10", "compile=false")


def planned(machine: Machine, margin: float, *overrides: str) -> PlanningResult:
    request = ResolvedRequest.resolve(overrides=(*TIMES, *overrides))
    return choose_plan(request, GRAPH, machine, margin=margin)


@pytest.fixture(scope="module")
def full() -> Machine:
    """A machine whose memory the fastest plan of the model fills to 99 %."""
    result = planned(tiny_machine(runtime=1000), 0.0)
    assert result.prediction is not None
    return tiny_machine(runtime=1000, memory=round(result.prediction.peaks[0].peak_bytes / 0.99))


def test_the_whole_interval_of_its_peak_leaves_the_margin(full: Machine):
    result = planned(full, 0.05)
    assert result.prediction is not None
    peak = result.prediction.peaks[0]
    assert peak.capacity_bytes == full.budget_bytes
    assert peak.high_bytes <= 0.95 * full.budget_bytes + 1


def test_the_proved_fastest_plan_is_shown_beside_it(full: Machine):
    result, proved = planned(full, 0.05), planned(full, 0.0)
    assert result.fastest is not None
    assert result.fastest.plan == proved.plan
    assert result.fastest.slower_seconds < 0
    assert proved.fastest is None
    assert all(each.slower_seconds >= 0 for each in result.runners_up)


def test_where_there_is_room_it_is_the_proved_fastest_plan():
    roomy = tiny_machine(runtime=1000)
    result = planned(roomy, 0.05)
    assert result.plan == planned(roomy, 0.0).plan
    assert result.fastest is None


def test_where_no_plan_leaves_the_margin_it_is_the_proved_fastest_plan(full: Machine):
    result = planned(full, 0.9)
    assert result.plan == planned(full, 0.0).plan
    assert result.fastest is None


def test_a_memory_budget_that_is_named_may_be_filled(full: Machine):
    budget = f"memory={full.budget_bytes}"
    device = full.model_copy(update={"system": "measured here"})
    result = planned(device, 0.05, budget)
    assert result.plan == planned(device, 0.0, budget).plan


def test_a_near_plan_that_slower_links_delay_less_is_chosen():
    machine = tiny_machine(devices=4, runtime=1000)
    link = machine.links[0].model_copy(update={"rate": 1.8e8, "latency": 1e-6})
    machine = machine.model_copy(update={"links": (link,)})
    space, alone = (
        PlanSpace(ResolvedRequest.resolve(overrides=(*TIMES, *pins)), GRAPH, machine)
        for pins in ((), ("parallel.data=1", "parallel.pipeline=1", "parallel.tensor=1"))
    )
    found, one = (fastest_plans(each, machine.budget_bytes) for each in (space, alone))
    assert found.best[0][0].parallel.data == 4
    queued, careful = (
        plan_to_queue(space, found, one.best[:1], machine.budget_bytes, margin)
        for margin in (0.05, 0.2)
    )
    assert queued == found.best[0]
    assert careful == one.best[0]
