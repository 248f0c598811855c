"""What a plan is compared with, whatever it pins."""

from dataclasses import replace
from pathlib import Path

import pytest

from windlass import api
from windlass.errors import PlanError
from windlass.verify.check import plain_plan, small_plan

TINY = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.vocabulary=257", "train.batch=8",
    "train.sequence=16", "train.steps=3", "precision=float32", "data.tokenizer=byte",
)  # fmt: skip


def planned_with(*pins: str) -> api.Planned:
    return api.plan("gpt-tiny", *TINY, *pins)


def small_text(folder: Path) -> str:
    text = folder / "text" / "table.txt"
    text.parent.mkdir()
    text.write_text("\n".join(f"{n} times {n} is {n * n}" for n in range(400)))
    return f"data.source={text.parent}"


@pytest.mark.parametrize(
    "pins",
    [
        ("recompute=full", "batch.micro=8"),
        ("recompute=selective", "recompute_layers=1", "batch.micro=8"),
        ("offload.optimizer=disk", "batch.micro=8"),
        ("phases=3", "batch.micro=8"),
        ("compile=true", "batch.micro=8"),
    ],
    ids=lambda pins: pins[0],
)
def test_a_plan_is_compared_with_a_plain_run_and_never_with_itself(pins: tuple[str, ...]) -> None:
    planned = planned_with(*pins)
    reference = plain_plan(planned).plan
    assert reference.label != planned.plan.label
    assert not reference.offloads
    assert not reference.compile
    (stage,) = reference.stages
    assert stage.recompute == "none"
    assert len(stage.phases) == 1
    assert reference.parallel.devices == 1


def test_a_plan_in_phases_equals_a_plain_run_bit_for_bit_under_each_attention(
    tmp_path: Path,
) -> None:
    pins = ("phases=3", "attention=math", "precision=bfloat16", small_text(tmp_path))
    planned = api.verification(planned_with(*pins), steps=2)
    assert api.Verifier(planned, tmp_path).verify().passed


def test_the_run_beside_plain_pytorch_has_two_micro_batches_in_float64() -> None:
    small = small_plan(plain_plan(planned_with("moments=int8", "phases=3")))
    assert (small.plan.precision, small.plan.moments) == ("float64", "float32")
    assert small.plan.batch.accumulation == 2
    assert small.request.train.batch == small.plan.global_batch


def test_a_model_that_only_fits_with_a_plan_is_refused_with_its_size(tmp_path: Path) -> None:
    planned = planned_with("phases=3", small_text(tmp_path))
    machine = planned.machine
    memory = machine.device.memory.model_copy(update={"capacity_bytes": 2**10})
    tiers = (memory, *machine.device.tiers[1:])
    device = machine.device.model_copy(update={"tiers": tiers})
    verifier = api.Verifier(planned, tmp_path)
    verifier._plain = replace(
        verifier._plain, machine=machine.model_copy(update={"device": device})
    )
    with pytest.raises(PlanError, match=r"keeps everything in memory, predicted .* of 1.00 KiB"):
        verifier.verify()
