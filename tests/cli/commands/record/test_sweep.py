"""`windlass sweep`: searches settings with many runs, and shows what was found."""

import json
from pathlib import Path

import pytest

from command_line import TINY, Windlass


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """A grid of two points, one of which does not fit."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("3 times 4 is 12\n" * 400)
    return ("sweep", *TINY, f"data.source={text}", "train.steps=6", "memory=64KiB,4GiB")


def test_a_sweep_runs_each_trial_once_and_shows_what_it_found(
    windlass: Windlass, words: tuple[str, ...], tmp_path: Path
) -> None:
    done = windlass(*words, "--name", "memory")

    assert done.returncode == 0, done.stderr
    assert "2 of 2 trials done (1 finished, 1 failed)" in done.stdout
    assert "memory-0000: `gpt-tiny` " in done.stdout
    assert "best    runs/memory-0001" in done.stdout
    again = windlass(*words, "--name", "memory")
    assert "2 of 2 trials done" in again.stdout
    rows = json.loads(windlass("runs", "--group", "memory", "--json").stdout)
    assert len(rows) == 1

    shown = windlass("sweep", "show", "memory", "--picture", "sweep.svg")
    assert "2 of 2 trials done" in shown.stdout
    assert (tmp_path / "sweep.svg").read_text().startswith("<svg")
    (sweep,) = json.loads(windlass("sweep", "show", "--json").stdout)
    assert [trial["state"] for trial in sweep["trials"]] == ["failed", "finished"]


def test_a_sweep_that_is_none_is_refused(windlass: Windlass) -> None:
    missing = windlass("sweep", "show", "nothing")

    assert missing.returncode == 2
    assert "no sweep `nothing` in `runs`" in missing.stderr
