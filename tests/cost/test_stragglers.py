"""A step over several hosts waits for the slowest, in the simulator and by the array clock."""

from math import e

import numpy as np
import pytest

from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.cost.clock.array_clock import ArrayClock
from windlass.cost.predict import predict_plan
from windlass.cost.simulator.event_simulator import simulate
from windlass.planner.space.plan_space import PlanSpace
from windlass.program.lowering.lower import lower
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.request import ResolvedRequest

GRAPH = sharded_graph(tiny_graph(layers=4, width=64, vocabulary=90), (2,))
EVEN = tiny_machine(devices=8).model_copy(update={"hosts": 4, "devices_per_host": 2})
"""Four hosts of two devices, all equally fast."""
UNEVEN = EVEN.model_copy(update={"stragglers": 0.05})
PINS = (
    "train.batch=8", "train.sequence=32", "train.steps=10", "compile=false", "precision=float32",
)  # fmt: skip


def plans(on: Machine) -> list[tuple[Plan, float, float]]:
    """Every twelfth plan of a small space, with their step times and lower bounds."""
    space = PlanSpace(ResolvedRequest.resolve(overrides=PINS), GRAPH, on)
    clock, everything = ArrayClock(space.base, GRAPH, on), np.arange(space.table.count)
    found = []
    for pipeline in space.pipeline_degrees:
        for option in space.options(pipeline):
            for columns, _ in space.columns(option, space.legal(option, everything)):
                seconds, least = clock.step_seconds(columns), clock.least_seconds(columns)
                found += [
                    (space.plan(columns, row), float(seconds[row]), float(least[row]))
                    for row in range(0, columns.count, 12)
                ]
    return found


@pytest.mark.parametrize(("devices", "hosts"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_hosts_are_filled_one_after_the_other(devices: int, hosts: int):
    each = UNEVEN.model_copy(update={"devices_per_host": 1})
    assert UNEVEN.straggler_factor(devices) == each.straggler_factor(hosts)


def test_each_e_fold_of_hosts_adds_the_same_share_of_a_step():
    assert UNEVEN.straggler_factor(2) == 1
    assert UNEVEN.straggler_factor(200) - UNEVEN.straggler_factor(20) == pytest.approx(
        UNEVEN.straggler_factor(20) - UNEVEN.straggler_factor(2)
    )
    many = UNEVEN.model_copy(update={"devices_per_host": 1})
    assert many.straggler_factor(round(1e6 * e)) - many.straggler_factor(10**6) == pytest.approx(
        0.05, rel=1e-6
    )


def test_where_nobody_knows_hosts_are_taken_to_be_equally_fast():
    assert EVEN.straggler_factor(8) == 1


@pytest.mark.parametrize("cut", [{"pipeline": 4}, {"data": 8}, {"tensor": 2, "data": 2}])
def test_waiting_for_the_slowest_host_is_a_term_of_the_step(cut: dict[str, int]):
    plan = tiny_plan(GRAPH, UNEVEN, accumulation=4, **cut)
    even, prediction = predict_plan(plan, GRAPH, EVEN), predict_plan(plan, GRAPH, UNEVEN)

    waited = prediction.by_term["waiting for the slowest host"]
    assert prediction.step_seconds == pytest.approx(
        even.step_seconds * UNEVEN.straggler_factor(plan.parallel.devices)
    )
    assert waited == pytest.approx(prediction.step_seconds - even.step_seconds)
    assert sum(prediction.by_term.values()) == pytest.approx(prediction.step_seconds)
    assert sum(prediction.by_kind.values()) == pytest.approx(prediction.step_seconds)
    assert "waiting for the slowest host" not in even.by_term


def test_the_timeline_ends_with_the_step_of_the_slowest_host():
    plan = tiny_plan(GRAPH, UNEVEN, pipeline=4, accumulation=4)
    programs = lower(plan, GRAPH)
    lanes = simulate(plan, GRAPH, UNEVEN, programs).devices
    prediction = predict_plan(plan, GRAPH, UNEVEN, programs)
    assert max(max(lane.ends) for lane in lanes) == pytest.approx(prediction.step_seconds)


def test_the_array_clock_waits_for_stragglers_as_long_as_the_simulator():
    for (plan, even, _), (same, uneven, least) in zip(plans(EVEN), plans(UNEVEN), strict=True):
        assert plan.parallel == same.parallel
        clocked = predict_plan(plan, GRAPH, UNEVEN), predict_plan(plan, GRAPH, EVEN)
        ratio = clocked[0].step_seconds / clocked[1].step_seconds
        assert uneven / even == pytest.approx(ratio, rel=1e-9)
        assert least <= uneven * (1 + 1e-9)
