"""Runs that leave out batches."""

import json
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.errors import RequestError


def losses(run: windlass.Run) -> list[float]:
    return [step.loss for step in windlass.load(run.folder).steps]


def test_a_resumed_run_that_leaves_out_batches_goes_on_as_one_that_never_had_them(
    home: Path,
) -> None:
    words = (*TINY, f"data.source={home / 'text'}", "train.steps=8", "train.save_every=4")
    plain = windlass.train(*words, root=home / "runs")
    steps = iter(plain)
    for step in steps:
        if step.step == 5:
            break
    del steps
    early = losses(plain)

    resumed = windlass.resume(plain.folder, skip_batches=["6-7"])
    list(resumed)

    whole = windlass.train(*words, "train.skip_batches=6-7", root=home / "runs")
    list(whole)
    assert losses(resumed) == losses(whole)
    assert losses(whole)[:5] == early
    assert windlass.load(resumed.folder).request.train.skip_batches == ("6-7",)
    assert not windlass.load(resumed.folder).faults


def test_what_cannot_be_left_out_is_refused_in_one_sentence(home: Path) -> None:
    words = (*TINY, f"data.source={home / 'text'}", "train.steps=8", "train.save_every=4")
    run = windlass.train(*words, root=home / "runs")
    steps = iter(run)
    for step in steps:
        if step.step == 5:
            break
    del steps

    with pytest.raises(RequestError, match=r"has taken batch 4 at step 4.*train --from"):
        windlass.resume(run.folder, skip_batches=["4-6"])
    with pytest.raises(RequestError, match="write a batch, or the first and the last one"):
        windlass.resume(run.folder, skip_batches=["6-5"])


def test_packed_rows_of_a_later_batch_keep_their_own_documents(home: Path) -> None:
    path = home / "lines.jsonl"
    lines = [json.dumps({"text": "one or two words " * (1 + n % 5)}) for n in range(80)]
    path.write_text("\n".join(lines), encoding="utf-8")
    words = (
        "bert-tiny", "model.layers=1", "model.width=32", "model.heads=2", "model.vocabulary=258",
        f"data.source={path}", "data.tokenizer=byte", "data.packing=true", "train.sequence=128",
        "train.batch=2", "train.evaluate_sequences=0", "compile=false", "precision=float32",
        # No weight moves, so that a batch has the same loss at any step.
        "train.learning_rate=1e-30",
    )  # fmt: skip
    whole = windlass.train(*words, "train.steps=2", root=home / "runs")
    list(whole)
    later = windlass.train(*words, "train.steps=1", "train.skip_batches=1", root=home / "runs")
    list(later)
    assert losses(later) == losses(whole)[1:]


@pytest.mark.slow
def test_a_run_that_leaves_out_batches_equals_plain_pytorch(home: Path) -> None:
    assert windlass.check(*TINY, f"data.source={home / 'text'}", "train.skip_batches=2-4")
