"""Where plans record their steps, and what the prediction makes of it."""

import pytest

from factories import tiny_graph, tiny_machine
from windlass import plan
from windlass.api import Planned
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.schema.request import ResolvedRequest
from windlass.schema.train_request import TrainSettings

SIZES = ("train.batch=8", "train.sequence=512", "batch.micro=8", "compile=false", "loss=plain")


def planned(*overrides: str, machine: str = "h100") -> Planned:
    return plan("gpt2-124m", *SIZES, *overrides, machine=machine)


RECORDED = "step_graph=true"


def test_no_plan_records_its_steps_unless_that_is_asked_for():
    assert planned().plan.step_graph is None
    assert planned(RECORDED).plan.step_graph is True


def test_recorded_steps_expose_no_launch_of_a_pass_or_an_update():
    recorded, plain = planned(RECORDED), planned()
    assert plain.prediction.by_term["launch"] > 0
    assert "launch" not in recorded.prediction.by_term
    assert recorded.prediction.step_seconds < plain.prediction.step_seconds


def test_recorded_steps_are_predicted_to_take_memory_for_an_evaluation_beside_them():
    peaks = [planned(*pins).prediction.peaks[0].by_class for pins in ((RECORDED,), ())]
    logits = 8 * 512 * 50257
    assert peaks[0]["working"] - peaks[1]["working"] > 4 * logits
    assert {**peaks[0], "working": 0} == {**peaks[1], "working": 0}


@pytest.mark.parametrize(
    "pins",
    [("train.optimizer=lion",), ("moments=int8",), ("offload.optimizer=host",), ("phases=3",)],
    ids=" ".join,
)
def test_what_a_recording_cannot_hold_is_refused_in_one_sentence(pins: tuple[str]):
    with pytest.raises(InputErrors, match="`step_graph` = true") as raised:
        planned(*pins, RECORDED)
    assert len(raised.value.messages) == 1


def test_a_cpu_refuses_to_record_steps_in_one_sentence():
    graph, machine = tiny_graph(), tiny_machine()
    train = TrainSettings(steps=1, batch=1, sequence=16)
    request = ResolvedRequest(step_graph=True, train=train)
    with pytest.raises(InputErrors, match="only those of kind `cuda` record steps") as raised:
        choose_plan(request, graph, machine)
    assert len(raised.value.messages) == 1


def test_a_node_records_the_steps_of_one_of_its_devices():
    node = "dgx-h100"
    one = ("parallel.pipeline=1", "parallel.tensor=1", "parallel.data=1")
    assert planned(RECORDED, *one, machine=node).plan.step_graph is True
    with pytest.raises(InputErrors, match="on 8 devices"):
        planned(RECORDED, machine=node)
