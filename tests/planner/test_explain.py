import re
from dataclasses import replace

import pytest

import windlass
from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.errors import PlanError
from windlass.planner.choose import choose_plan
from windlass.planner.explain import explain_idle_devices, explain_result
from windlass.schema.request import ResolvedRequest

GRAPH = tiny_graph(layers=3, width=64, vocabulary=128)


def request(*overrides: str) -> ResolvedRequest:
    sizes = ("train.batch=8", "train.sequence=32", "train.steps=400")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def test_a_fitting_plan_is_explained_with_time_memory_and_runners_up():
    choice = choose_plan(request(), GRAPH, tiny_machine())
    explanation = explain_result(choice)
    assert explanation.verdict.startswith("fits: ")
    assert "of 1.00 GiB" in explanation.verdict
    assert explanation.help == explanation.infeasible == ()
    assert len(explanation.runners_up) >= 3
    assert all("slower (+" in line or "as fast" in line for line in explanation.runners_up)


def test_an_infeasible_request_is_explained_with_bytes_and_what_would_help():
    pins = ("recompute=none", "precision=float32", "compile=false", "batch.micro=8")
    choice = choose_plan(request(*pins, "memory=900kB"), GRAPH, tiny_machine())
    explanation = explain_result(choice)
    assert explanation.verdict.startswith("does not fit: ")
    assert "the device has 879 KiB" in explanation.verdict
    plan, _, lacks = explanation.infeasible[0].partition(": ")
    assert plan == "float32, eager, one micro-batch of 8, keeps all activations"
    assert re.match(r"[\d.]+ [KM]iB too much at ", lacks)
    assert any(line.startswith("`batch.micro=") for line in explanation.help)
    assert any(line.startswith("`memory=") for line in explanation.help)


def test_a_model_far_too_large_is_given_in_devices():
    explanation = explain_result(
        choose_plan(request("memory=100kB"), GRAPH, tiny_machine(memory="100kB"))
    )
    assert "weights, gradients and optimizer state alone are " in explanation.verdict
    assert explanation.help[0].startswith("a device with ")
    assert "at least " in explanation.help[-1]


def test_a_budget_that_the_process_alone_fills_is_explained_so():
    explanation = explain_result(
        choose_plan(request("memory=100kB"), GRAPH, tiny_machine(runtime="1MiB"))
    )
    assert explanation.verdict.endswith("the process alone holds 1.00 MiB")
    assert explanation.help[0].startswith("`memory=")  # the machine has more than the budget


def test_idle_devices_are_explained_with_the_way_out():
    eight, alone = tiny_machine(devices=8), tiny_plan(GRAPH, tiny_machine(devices=8))
    for pins, words in (
        ((), "with 8 sequences a step, no plan for more of them is predicted to be faster"),
        (
            ("parallel.pipeline=1", "parallel.tensor=1", "parallel.data=1"),
            "the request names its parallel degrees; leave one of them open",
        ),
    ):
        sentence = explain_idle_devices(alone, request(*pins), eight)
        assert sentence is not None
        assert sentence.startswith(f"uses 1 of 8 devices: {words}")
    assert explain_idle_devices(alone, request(), tiny_machine()) is None


def test_no_more_devices_are_asked_for_where_there_are_enough():
    choice = choose_plan(request("memory=100kB"), GRAPH, tiny_machine())
    assert choice.advice is not None
    few, many = (
        explain_result(replace(choice, advice=replace(choice.advice, devices=220, **changes))).help
        for changes in ({"machine_devices": 16}, {"machine_devices": 256})
    )
    assert few[-1].startswith("at least 220 devices of this size would hold ")
    assert "would fill 220 of 256" in many[-1]


@pytest.mark.slow
def test_where_the_outer_memory_is_too_small_it_is_named_with_a_batch_that_fits():
    with pytest.raises(PlanError) as error:
        _ = windlass.plan("gpt3-175b", "train.batch=256", machine="cs-2", cache=False).plan
    message = str(error.value)
    assert "needs 3.66 TiB of `memoryx`, which has 3.64 TiB" in message
    assert "`train.batch=128` makes it fit" in message
    assert "devices of this size" not in message
    assert windlass.plan("gpt3-175b", "train.batch=128", machine="cs-2", cache=False).plan
