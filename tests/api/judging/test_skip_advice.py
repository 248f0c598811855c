"""A loss spike: its batches are named, with the command that leaves them out."""

import shlex
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.judge import Verdict
from windlass.judging.verdicts import with_skip_advice


def spike(first: int, last: int) -> Verdict:
    return Verdict(level="broken", sentences=("a spike",), quantity="loss", spike=(first, last))


def command_of(verdict: Verdict) -> list[str]:
    return shlex.split(verdict.sentences[-1].split("`")[1])


@pytest.mark.slow
def test_a_poisoned_shard_is_found_and_the_proposed_command_leaves_it_out(home: Path) -> None:
    """Noise in one of several files, which some samples of one epoch are made of."""
    for number in range(12):
        text = "".join(f"{n} times {n} is {n * n}\n" for n in range(300))
        (home / "text" / f"{number}.txt").write_text(text)
    noise = "".join(chr(33 + (n * n * 7919 + n * 104729) % 89) for n in range(700))
    (home / "text" / "poison.txt").write_text(noise)
    words = (
        *TINY, f"data.source={home / 'text'}", "train.steps=240", "train.save_every=10",
        "train.keep=100", "data.held_out=0.05", "model.dropout=0", "train.learning_rate=3e-3",
    )  # fmt: skip
    run = windlass.train(*words, root=home / "runs")
    list(run)

    verdict = windlass.judge(run.folder)

    assert (verdict.level, verdict.quantity) == ("broken", "loss")
    assert verdict.spike is not None
    assert "poison.txt" in verdict.documents[0]
    command = command_of(verdict)
    assert command[:3] == ["windlass", "train", "--from"]
    batches = command[-1].partition("=")[2]
    step = command[3].rpartition("@")[2]
    child = windlass.train(
        None, command[-1], root=home / "runs",
        parent=windlass.find_parent(command[3], continues=True),
    )  # fmt: skip
    losses = [one.loss for one in child]
    first = int(batches.partition("-")[0])
    before = windlass.load(run.folder).steps
    assert max(losses[first - int(step) - 1 :][:3]) < before[verdict.spike[0] - 1].loss


def test_the_command_suits_the_checkpoints_that_are_kept(home: Path) -> None:
    words = ("train.steps=12", "train.save_every=4", "train.keep=2", "train.skip_batches=2-3")
    run = windlass.train(*TINY, f"data.source={home / 'text'}", *words, root=home / "runs")
    list(run)  # keeps the checkpoints of steps 8 and 12

    later, between, early = (
        with_skip_advice(spike(*steps), run.folder) for steps in ((13, 13), (10, 11), (5, 6))
    )

    # Step 13 takes batch 15, as two are left out.
    assert command_of(later) == ["windlass", "resume", str(run.folder), "--skip-batches", "15"]
    assert command_of(between)[2:4] == ["--from", f"{run.folder}@8"]
    assert command_of(between)[-1] == "train.skip_batches=12-13"
    assert "no checkpoint from before it is kept" in early.sentences[-1]
    assert "batches 7-8" in early.sentences[-1]
