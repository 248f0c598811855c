import pytest

from factories import tiny_graph, tiny_machine
from windlass.planner.advice.advise import MIN_ALTERNATIVES
from windlass.planner.advice.alternatives import alternatives
from windlass.planner.choose import choose_plan
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.schema.request import ResolvedRequest

GRAPH = tiny_graph(layers=6, width=2048)
"""State and activations are both larger than what state passes through on its way."""
MACHINE = tiny_machine(memory="4 GiB", host="8 GiB")


def asked(**changes: object) -> ResolvedRequest:
    train = {"batch": 64, "sequence": 64, "steps": 400}
    return ResolvedRequest.model_validate({"train": train} | changes)


def overridden(request: ResolvedRequest, *overrides: str) -> ResolvedRequest:
    pins = {"batch.micro": request.batch.micro, "recompute": request.recompute}
    kept = [f"{key}={value}" for key, value in pins.items() if value is not None]
    first = ("train.batch=64", "train.sequence=64", "train.steps=400")
    return ResolvedRequest.resolve(overrides=(*first, *kept, *overrides))


@pytest.mark.parametrize("pins", [{"phases": 1}, {"phases": 1, "batch": {"micro": 64}}])
def test_if_nothing_fits_at_least_three_alternatives_are_named_with_phases_among_them(
    pins: dict[str, object],
):
    budget = 180 * 2**20
    advice = choose_plan(asked(memory=budget, **pins), GRAPH, MACHINE).advice
    assert advice is not None
    fitting = [change for change in advice.changes if change.peak_bytes <= budget]
    assert len(fitting) >= MIN_ALTERNATIVES
    assert any(each.startswith("phases=") for change in fitting for each in change.overrides)


@pytest.mark.parametrize("request_", [asked(), asked(batch={"micro": 64}, recompute="none")])
def test_each_alternative_fits_the_budget_with_its_overrides(request_: ResolvedRequest):
    whole = choose_plan(asked(), GRAPH, MACHINE).plan
    assert whole is not None
    budget = int(0.8 * stage_peak_bytes(whole, GRAPH, MACHINE)[0])
    changes = alternatives(request_, GRAPH, MACHINE, budget, base=1e-6, count=3)
    assert len(changes) >= MIN_ALTERNATIVES
    assert {change.plan.offloads for change in changes} == {True, False}
    for change in changes:
        assert change.peak_bytes <= budget
        choice = choose_plan(
            overridden(request_, f"memory={budget}", *change.overrides), GRAPH, MACHINE
        )
        assert choice.plan is not None, change.overrides
        assert choice.plan.stages == change.plan.stages
        assert choice.plan.batch == change.plan.batch


def test_alternatives_are_sorted_by_cost_and_distinct():
    changes = alternatives(asked(), GRAPH, MACHINE, 2**31, base=1e-6, count=6)
    costs = [change.cost for change in changes]
    assert costs == sorted(costs)
    assert len({change.overrides for change in changes}) == len(changes) >= 6


def test_a_machine_without_offload_tiers_has_no_alternatives_in_phases():
    changes = alternatives(asked(), GRAPH, tiny_machine(), 2**31, base=1e-6, count=3)
    assert changes
    assert not any(change.plan.offloads for change in changes)
