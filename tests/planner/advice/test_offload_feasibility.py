import pytest
from hypothesis import given, strategies as st

from factories import tiny_graph, tiny_machine
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.planner.space.stage_partition import balanced_partition
from windlass.schema.request import ResolvedRequest

HOST = "1 GiB"
GRAPH = tiny_graph(layers=6)


def asked(**changes: object) -> ResolvedRequest:
    return ResolvedRequest.model_validate(
        {"train": {"batch": 4, "sequence": 16, "steps": 400}} | changes
    )


@given(st.integers(1, 9), st.data())
def test_phases_cover_all_layers_in_order_and_none_is_empty(layers: int, data: st.DataObject):
    graph = tiny_graph(layers=layers)
    count = data.draw(st.integers(1, graph.layers))
    phases = balanced_partition(tuple(kind.parameter_count for kind in graph.layer_kinds()), count)
    assert len(phases) == count
    assert [layer for first, last in phases for layer in range(first, last)] == list(
        range(graph.layers)
    )
    assert all(first < last for first, last in phases)


def test_a_model_that_fits_does_not_run_in_phases():
    plan = choose_plan(asked(), GRAPH, tiny_machine(host=HOST)).plan
    assert plan is not None
    assert not plan.offloads


def test_the_plan_has_the_requested_number_of_phases():
    plan = choose_plan(asked(phases=3), GRAPH, tiny_machine(host=HOST)).plan
    assert plan is not None
    assert len(plan.stages[0].phases) == 3
    assert set(plan.offload_tiers) == {"parameters", "gradients", "optimizer"}
    assert plan.offload.parameters == "host"


def test_a_model_too_large_for_the_device_runs_in_phases():
    wide = tiny_graph(layers=6, width=2048)
    machine = tiny_machine(memory="120 MiB", host="8 GiB")
    plan = choose_plan(asked(), wide, machine).plan
    assert plan is not None
    assert plan.offloads
    assert choose_plan(asked(phases=1), wide, machine).plan is None


def test_an_offload_tier_that_is_too_small_is_named():
    wide = tiny_graph(layers=6, width=2048)
    advice = choose_plan(asked(), wide, tiny_machine(memory="300 MiB", host="200 MiB")).advice
    assert advice is not None
    (short,) = advice.tier_shortages
    assert short.tier == "host"
    assert short.needed_bytes > short.capacity_bytes == 200 * 2**20


def test_more_phases_than_layers_are_refused():
    with pytest.raises(InputErrors, match="has 8 layers; ask for 8 at most"):
        choose_plan(asked(phases=9), GRAPH, tiny_machine(host=HOST))


@pytest.mark.parametrize("phases", [None, 3])
def test_smaller_moments_are_suggested_if_the_offload_tier_then_has_room(phases: int | None):
    wide = tiny_graph(layers=6, width=2048)
    machine = tiny_machine(memory="250 MiB", host="280 MiB")
    if phases is None:
        advice = choose_plan(asked(), wide, machine).advice
        assert advice is not None
        named = {change.overrides: change.plan for change in advice.changes}
        plan = named[("moments=bfloat16",)]
        assert plan.offloads
        assert plan.moments == "bfloat16"
    else:
        with pytest.raises(InputErrors, match="`moments` = bfloat16, with which it has room"):
            choose_plan(asked(phases=phases), wide, machine)


def test_moments_are_as_requested_and_never_chosen():
    machine = tiny_machine(host=HOST)
    plans = [choose_plan(asked(**pins), GRAPH, machine).plan for pins in ({}, {"moments": "int8"})]
    assert [plan and plan.moments for plan in plans] == ["float32", "int8"]


def test_phases_that_no_offload_tier_has_room_for_are_refused_with_the_bytes():
    wide = tiny_graph(layers=6, width=2048)
    with pytest.raises(InputErrors, match=r"`phases` = 3 needs .* on host, which has 200 MiB"):
        choose_plan(asked(phases=3), wide, tiny_machine(host="200 MiB"))
