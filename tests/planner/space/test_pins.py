"""Pins are kept, or refused in a sentence."""

import pytest

from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.planner.space.pins import broken_pins, without_excluded_phases
from windlass.schema.request import ResolvedRequest

GRAPH = sharded_graph(tiny_graph(layers=4))
SIZES = ("train.batch=8", "train.sequence=16", "train.steps=10")


def request(*overrides: str) -> ResolvedRequest:
    return ResolvedRequest.resolve(overrides=(*SIZES, *overrides))


@pytest.mark.parametrize(
    ("devices", "pins", "sentence"),
    [
        (1, "parallel.pipeline=2", "`parallel.pipeline` = 2, but `tiny` has 1 device"),
        (1, "parallel.data=2", "`parallel.data` = 2, but `tiny` has 1 device"),
        (4, "parallel.data=4 parallel.tensor=2", "2 x 4 = 8, but `tiny` has 4 devices"),
        (1, "parallel.virtual_stages=3", "= 3 on one device, which has no pipeline"),
        (4, "parallel.virtual_stages=3 parallel.schedule=gpipe", "runs a stage as one model chunk"),
        (4, "parallel.virtual_stages=1 parallel.schedule=interleaved", "a stage has 2 or more"),
        (4, "parallel.pipeline=1 parallel.schedule=gpipe", "= 1, which has no pipeline"),
        (1, "phases=2 recompute=none", "`recompute` = none with `phases` = 2"),
        (4, "phases=2 recompute_layers=1", "`recompute_layers` = 1 with `phases` = 2"),
        (4, "phases=2 parallel.schedule=zero-bubble", "phases have a schedule of their own"),
        (4, "phases=2 offload.optimizer=host", "phases offload weights and optimizer state"),
        (1, "recompute=selective compile=true", "`recompute` = selective with `compile`"),
        (1, "memory=2GiB", "`memory` = 2.00 GiB, but each device of `tiny` has 1.00 GiB"),
        (1, "batch.micro=2 batch.accumulation=3", "cannot make `train.batch` = 8"),
    ],
)
def test_a_pin_that_no_plan_keeps_is_refused_in_a_sentence(devices: int, pins: str, sentence: str):
    machine = tiny_machine(devices=devices, host="8 GiB")
    with pytest.raises(InputErrors) as caught:
        choose_plan(request(*pins.split()), GRAPH, machine)
    assert any(sentence in message for message in caught.value.messages)


@pytest.mark.parametrize(
    ("pin", "phases"),
    [("recompute=none", 1), ("recompute_layers=1", 1), ("precision=float64", 1),
     ("recompute=full", None), ("phases=2", 2)],
)  # fmt: skip
def test_a_pin_that_phases_would_break_keeps_the_plan_out_of_phases(pin: str, phases: int | None):
    assert without_excluded_phases(request(pin), tiny_machine()).phases == phases


def test_a_plan_that_breaks_its_request_is_found_key_by_key():
    machine = tiny_machine(devices=4, host="8 GiB")
    plan = tiny_plan(GRAPH, machine, micro=2, accumulation=2, data=2, precision="bfloat16")
    kept = request("parallel.data=2", "batch.micro=2", "precision=bfloat16", "recompute=none")
    assert not tuple(broken_pins(kept, plan))
    asked = request(
        "parallel.tensor=2", "sharding.optimizer=2", "batch.accumulation=4", "precision=float32",
        "moments=int8", "recompute_layers=1", "phases=2", "train.clip=inf", "train.batch=16",
        "train.sequence=32", "compile=true", "recompute=full", "offload.optimizer=host",
    )  # fmt: skip
    assert {key for key, _, _ in broken_pins(asked, plan)} == {
        "parallel.tensor", "sharding.optimizer", "batch.accumulation", "precision", "moments",
        "recompute_layers", "phases", "train.clip", "train.batch", "train.sequence", "compile",
        "recompute", "offload.optimizer",
    }  # fmt: skip
