"""`windlass import-runs` and `windlass mirror`: runs from other trackers, and to them."""

import csv
import json
from pathlib import Path

from command_line import Windlass

WANDB = Path(__file__).parents[3] / "integrations" / "data" / "wandb"


def test_runs_of_another_tracker_are_taken_over_once(windlass: Windlass):
    first = windlass("import-runs", str(WANDB))
    assert first.returncode == 0, first.stderr
    assert "2 new, 0 changed and 0 unchanged runs in `runs`" in first.stdout
    assert "note: not taken over: 2 values that are no numbers" in first.stderr
    again = windlass("import-runs", str(WANDB), "--json")
    runs = json.loads(again.stdout)["runs"]
    assert [run["change"] for run in runs] == ["unchanged", "unchanged"]
    assert [run["tracker"] for run in runs] == ["wandb", "wandb"]
    listed = windlass("runs")
    assert "0.683" in listed.stdout
    shown = windlass("show", runs[0]["id"])
    assert shown.returncode == 0, shown.stderr


def test_a_run_is_copied_to_several_targets_at_once(windlass: Windlass, tmp_path: Path):
    windlass("import-runs", str(WANDB))
    done = windlass("mirror", "last", "--to", "csv:steps.csv", "--to", "tensorboard:logs")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["csv", "tensorboard"]
    with (tmp_path / "steps.csv").open(encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 26
    assert len(list((tmp_path / "logs").rglob("*tfevents*"))) == 1


def test_what_cannot_be_imported_or_copied_is_refused_in_a_sentence(windlass: Windlass):
    for words, message in (
        (("import-runs", "nothing"), "`nothing` does not exist; name a file or a folder"),
        (("mirror", "--to", "csv:a.csv"), "no run in `runs`; start one with `windlass train`"),
    ):
        refused = windlass(*words)
        assert refused.returncode == 2
        assert refused.stderr.strip() == f"windlass: {message}"
