"""A plan that is given: what it decides of a request, and what is refused."""

import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.errors import InputErrors, PlanError
from windlass.planner.defaults import resolve_defaults
from windlass.planner.given_plan import request_of_plan, result_of_given_plan
from windlass.planner.result import PlanningResult
from windlass.schema import Graph, Machine, Offload, Plan, Request

GRAPH, MACHINE = tiny_graph(), tiny_machine()


def result(plan: Plan, graph: Graph, machine: Machine, *overrides: str) -> PlanningResult:
    request = request_of_plan(plan, Request.resolve(None, overrides))
    return result_of_given_plan(plan, resolve_defaults(request, graph, machine)[0], graph, machine)


def test_the_plan_decides_what_the_request_leaves_open() -> None:
    plan = tiny_plan(GRAPH, MACHINE, micro=2, accumulation=3, clip=False, moments="int8")

    request = request_of_plan(plan, Request.resolve(None, ("train.learning_rate=0.5",)))

    assert (request.train.batch, request.train.sequence) == (6, 16)
    assert (request.train.clip, request.moments) == (None, "int8")
    assert request.train.learning_rate == 0.5


def test_every_value_that_contradicts_the_plan_is_named() -> None:
    plan = tiny_plan(GRAPH, MACHINE, micro=2, accumulation=3)
    overrides = ("parallel.tensor=2", "train.batch=8", "compile=true", "train.clip=inf", "phases=2")

    with pytest.raises(InputErrors) as error:
        request_of_plan(plan, Request.resolve(None, overrides))

    *others, last = error.value.messages
    assert others == [
        "`parallel.tensor` = 2, but the plan has 1",
        "`train.batch` = 8, but the plan has 6",
        "`compile` = true, but the plan has false",
        "`phases` = 2, but the plan has 1",
    ]
    assert last.startswith("`train.clip` = inf, but the plan has `clip` = true; leave out")


def test_values_that_the_plan_has_too_are_accepted() -> None:
    plan = tiny_plan(GRAPH, MACHINE, micro=2, accumulation=3, recompute="full")
    overrides = ("parallel.tensor=1", "train.batch=6", "recompute=full", "train.clip=0.5")

    assert request_of_plan(plan, Request.resolve(None, overrides)).train.batch == 6


def test_a_given_plan_is_the_result_with_its_prediction() -> None:
    plan = tiny_plan(GRAPH, MACHINE)

    given = result(plan, GRAPH, MACHINE)

    assert given.plan == plan
    assert given.prediction is not None
    assert given.prediction.plan == plan.label
    assert given.prediction.fits


def test_an_edited_plan_is_refused_with_every_rule_that_it_breaks() -> None:
    plan = tiny_plan(GRAPH, MACHINE, sharding=(1, 2), offload=Offload(gradients="host"))

    with pytest.raises(InputErrors) as error:
        result(plan, GRAPH, MACHINE)

    assert len(error.value.messages) == 3  # no such tier, no such replicas, gradients alone


def test_a_plan_that_takes_too_much_memory_does_not_fit_and_says_what_would_do() -> None:
    plan = tiny_plan(GRAPH, MACHINE)
    needed = result(plan, GRAPH, MACHINE).prediction
    assert needed is not None
    budget = needed.peaks[0].peak_bytes // 2

    given = result(plan, GRAPH, MACHINE, f"memory={budget}")

    assert given.plan is None
    assert given.advice is not None
    assert given.advice.over_bytes == needed.peaks[0].peak_bytes - budget
    assert [change.overrides for change in given.advice.changes] == [("memory=1MiB",)]


def test_a_plan_that_takes_too_much_of_an_offload_tier_is_refused() -> None:
    machine = tiny_machine(host=1024)
    plan = tiny_plan(GRAPH, machine, offload=Offload(optimizer="host"))

    with pytest.raises(PlanError, match=r"takes .* of `host`, which has 1\.00 KiB"):
        result(plan, GRAPH, machine)
