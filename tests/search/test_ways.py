import pytest

from factories import tiny_graph, tiny_machine
from windlass.search.advise import LEAST_NAMED
from windlass.search.choose import choose
from windlass.search.ways import ways
from windlass.search.weigh import memory_of
from windlass.spec.request import Request

GRAPH = tiny_graph(layers=6, width=2048)
"""State and activations are both larger than what state passes through on its way."""
MACHINE = tiny_machine(near="4 GiB", host="8 GiB")


def asked(**changes: object) -> Request:
    return Request.model_validate({"train": {"batch": 64, "sequence": 64}} | changes)


def overridden(request: Request, *overrides: str) -> Request:
    pins = {"batch.micro": request.batch.micro, "recompute": request.recompute}
    kept = [f"{key}={value}" for key, value in pins.items() if value is not None]
    first = ("train.batch=64", "train.sequence=64")
    return Request.resolve(overrides=(*first, *kept, *overrides))


@pytest.mark.parametrize("pins", [{"phases": 1}, {"phases": 1, "batch": {"micro": 64}}])
def test_where_nothing_fits_as_asked_at_least_three_plans_are_named_and_phases_among_them(
    pins: dict[str, object],
):
    near = 180 * 2**20
    advice = choose(asked(near=near, **pins), GRAPH, MACHINE).advice
    assert advice is not None
    fitting = [change for change in advice.changes if change.peak_bytes <= near]
    assert len(fitting) >= LEAST_NAMED
    assert any(each.startswith("phases=") for change in fitting for each in change.overrides)


@pytest.mark.parametrize("request_", [asked(), asked(batch={"micro": 64}, recompute="none")])
def test_each_way_fits_the_budget_by_what_it_adds_to_the_command_line(request_: Request):
    whole = choose(asked(), GRAPH, MACHINE).plan
    assert whole is not None
    near = int(0.8 * memory_of(whole, GRAPH, MACHINE).peak_bytes)
    found = ways(request_, GRAPH, MACHINE, near, base=1e-6, count=3)
    assert len(found) >= LEAST_NAMED
    assert {change.plan.streamed for change in found} == {True, False}
    for change in found:
        assert change.peak_bytes <= near
        mended = choose(overridden(request_, f"near={near}", *change.overrides), GRAPH, MACHINE)
        assert mended.plan is not None, change.overrides
        assert mended.plan.stages == change.plan.stages
        assert mended.plan.batch == change.plan.batch


def test_ways_are_told_cheapest_first_and_none_twice():
    found = ways(asked(), GRAPH, MACHINE, 2**31, base=1e-6, count=6)
    costs = [change.cost for change in found]
    assert costs == sorted(costs)
    assert len({change.overrides for change in found}) == len(found) >= 6


def test_a_machine_with_no_tier_beyond_the_near_one_has_no_ways_in_phases():
    found = ways(asked(), GRAPH, tiny_machine(), 2**31, base=1e-6, count=3)
    assert found
    assert not any(change.plan.streamed for change in found)
