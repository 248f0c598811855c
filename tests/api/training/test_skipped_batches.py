"""Runs that leave out batches."""

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


@pytest.mark.slow
def test_a_run_that_leaves_out_batches_equals_plain_pytorch(home: Path) -> None:
    assert windlass.check(*TINY, f"data.source={home / 'text'}", "train.skip_batches=2-4")
