"""`recompute_layers` in requests and plans: a number for all stages, or one for each."""

import pytest
from hypothesis import given, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from planner.test_multi_device import GRAPHS, machine, request
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.planner.recompute_layers import (
    recompute_layers,
    show_recompute_layers,
    with_recompute_layers,
)
from windlass.planner.result import differences
from windlass.schema.plan import Recompute
from windlass.schema.request import Request

GRAPH = tiny_graph(layers=8, tied=False)
modes = st.sampled_from(["full", "selective"])


def plan_of(pipeline: int, chunks: int, mode: Recompute):
    return tiny_plan(
        GRAPH, tiny_machine(devices=8), pipeline=pipeline, accumulation=pipeline, recompute=mode,
        schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks,
    )  # fmt: skip


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.sampled_from([1, 2]), modes)
def test_the_layers_that_a_plan_shows_are_a_request_for_them(
    counts: list[int], chunks: int, mode: Recompute
):
    plan = with_recompute_layers(plan_of(len(counts), chunks, mode), tuple(counts))
    shown = show_recompute_layers(recompute_layers(plan))
    if plan.recompute != "none" and shown != "all":
        asked = Request.resolve(overrides=(f"recompute_layers={shown}",)).recompute_layers
        assert asked is not None
        again = plan_of(len(counts), chunks, mode)
        assert with_recompute_layers(again, asked) == plan


@given(st.integers(1, 9), st.integers(1, 4), modes)
def test_a_number_is_the_same_for_all_stages(count: int, pipeline: int, mode: Recompute):
    plan = plan_of(pipeline, 1, mode)
    one, each = (with_recompute_layers(plan, layers) for layers in (count, (count,) * pipeline))
    assert one == each
    assert not isinstance(recompute_layers(one), tuple)


def test_a_runner_up_shows_a_number_for_each_stage():
    plan = plan_of(3, 1, "full")
    other = with_recompute_layers(plan, (1, 0, 2))
    assert differences(plan, other) == {"recompute_layers": "[1,0,2]"}
    assert differences(other, plan) == {"recompute_layers": "all"}


@pytest.mark.parametrize("pin", ["recompute_layers=[0,1]", "recompute_layers=[1,0]"])
def test_numbers_for_each_stage_are_what_the_chosen_plan_has(pin: str):
    plan = choose_plan(request(pin, "parallel.schedule=1f1b"), GRAPHS[2], machine(4, 1e9)).plan
    assert plan is not None
    assert plan.parallel.pipeline == 2
    assert f"recompute_layers={show_recompute_layers(recompute_layers(plan))}" == pin


@pytest.mark.parametrize(
    ("pins", "fault"),
    [
        (("recompute_layers=[1,0]", "parallel.pipeline=4"), "`parallel.pipeline` = 4"),
        (("recompute_layers=[1,0,1,1,1]",), "`tiny` has 4 devices"),
    ],
)
def test_numbers_for_other_stages_than_there_are_are_refused(pins: tuple[str, ...], fault: str):
    with pytest.raises(InputErrors, match=fault):
        choose_plan(request(*pins), GRAPHS[2], machine(4, 1e9))


@pytest.mark.parametrize("value", ["0", "[]", "[1,-1]", "true", "ten", "1.5"])
def test_what_counts_no_layers_is_refused(value: str):
    with pytest.raises(InputErrors, match="input should be a number of layers, at least 1"):
        Request.resolve(overrides=(f"recompute_layers={value}",))
