"""Which events a proof holds, and what it says that nobody compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import windlass
from windlass import api
from windlass.verify.proof_scope import overflows, proof_steps

TINY = (
    "gpt-tiny", "model.layers=1", "model.width=64", "model.heads=4", "model.vocabulary=257",
    "data.tokenizer=byte", "train.batch=4", "train.sequence=16", "compile=false",
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} times {number} is {number**2} " * 9)
    return f"data.source={folder}"


@pytest.mark.parametrize("every", ["sparsity.every=1", "sparsity.every=100"])
def test_moving_masks_are_proved_with_two_updates_in_each_run(text: str, every: str) -> None:
    sparsity = ("sparsity.level=0.5", "sparsity.block=16", "sparsity.schedule=rigl", every)
    check = windlass.check(*TINY, text, *sparsity, "train.ema=0.9", "train.skip_batches=100")
    assert check, (check.plain.first_mismatch, check.pytorch.first_mismatch)
    assert check.scope.events == {
        "end of the warm-up": 2, "evaluation": 4, "evaluation of averaged weights": 4,
        "mask update": 4, "batch left out": 4,
    }  # fmt: skip
    counts = {each.quantity: each.count for each in check.plain.comparisons}
    assert counts["buffer"] == 12


def test_a_proof_of_so_few_steps_that_an_event_is_rare_says_so(text: str) -> None:
    sparsity = ("sparsity.level=0.5", "sparsity.block=16", "sparsity.schedule=set")
    planned = api.plan(*TINY, text, *sparsity, "train.steps=900")
    proved = api.verified_numerics(planned, steps=1)
    scope = api.proof_scope(planned, proved, {})
    assert "mask update: happened never in the proof" in scope.not_compared


def test_what_a_proof_cannot_hold_is_named(text: str) -> None:
    words = (
        "sparsity.level=0.5",
        "sparsity.block=16",
        "sparsity.schedule=gradual",
        "sparsity.leg=1",
    )
    planned = api.plan(*TINY, text, *words, "train.steps=900")
    scope = api.proof_scope(planned, api.verification(planned, steps=3), {})
    told = "\n".join(scope.not_compared)
    assert "the change of shapes between the 5 legs" in told
    assert "how text becomes tokens" in told


def test_a_float16_proof_overflows_on_the_last_rank_in_two_of_five_steps(text: str) -> None:
    planned = api.plan(*TINY, text, "train.steps=5")
    float16 = planned.plan.model_copy(update={"precision": "float16"})
    halved = replace(planned, result=replace(planned.result, plan=float16))
    assert proof_steps(halved.request.model_copy(update={"precision": "float16"}), 3) == 5
    assert overflows(halved)
    assert not overflows(planned)
    assert "--overflow" in api.Instrumentation(overflow=True).command_options()


def test_packed_conversations_are_compared_as_they_are(tmp_path: Path) -> None:
    rows = []
    for n in range(60):
        answer = {"role": "assistant", "content": "j" * (n % 9 + 1)}
        rows.append({"messages": [{"role": "user", "content": f"{n}?"}, answer]})
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    check = windlass.check(
        *TINY, f"data.source={tmp_path / 'chat.jsonl'}", "data.format=chat", "data.packing=true",
        "train.sequence=64", "batch.micro=2",
    )  # fmt: skip
    assert check, (check.plain.first_mismatch, check.pytorch.first_mismatch)
    counts = {each.quantity: each.count for each in check.pytorch.comparisons}
    assert counts["documents"] == 3
    assert any("conversations" in each for each in check.scope.not_compared)
