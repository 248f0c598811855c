"""`windlass runs` lists, finds, tags and exports runs."""

import csv
import json
from pathlib import Path

from command_line import Windlass
from windlass.tracking.run_folder import ID_FILE, create_run_folder


def make(root: Path, name: str, loss: float = 4.0) -> Path:
    meta = {"model": name, "machine": "here", "group": "first"}
    with create_run_folder(root, name, documents={}, meta=meta) as run:
        run.journal.append_row(1, {"loss": loss, "seconds": 0.25})
        run.end("finished")
        return run.path


def test_older_runs_are_named_in_one_line_below_the_list(windlass: Windlass, tmp_path: Path):
    make(tmp_path / "runs", "gpt-new")
    old = make(tmp_path / "runs", "gpt-old")
    (old / ID_FILE).write_text("0190163d-8694-739b-aea5-966c26f8ad91\n")

    listed = windlass("runs")
    shown = windlass("show", old.name)

    assert listed.returncode == 0, listed.stderr
    assert "gpt-new" in listed.stdout
    (line,) = (line for line in listed.stdout.splitlines() if "gpt-old" in line)
    assert "another version of Windlass" in line
    assert shown.returncode == 2
    assert f"`runs/{old.name}` was written by an older Windlass (format 1," in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_filter_picks_runs_in_the_order_and_columns_asked_for(windlass: Windlass, tmp_path: Path):
    for name, loss in (("gpt-tiny", 4.0), ("gpt-tiny", 3.0), ("gpt-tiny", 7.0), ("other", 1.0)):
        make(tmp_path / "runs", name, loss)
    words = ("runs", 'model = "gpt-tiny" and loss < 5', "--sort", "loss")
    listed = windlass(*words, "--columns", "model, loss,seconds")
    assert listed.returncode == 0, listed.stderr
    lines = [line.split() for line in listed.stdout.splitlines() if "gpt-tiny" in line]
    assert lines == [["gpt-tiny", "3", "250", "ms"], ["gpt-tiny", "4", "250", "ms"]]
    found = json.loads(windlass(*words, "--json", "--group", "first").stdout)
    assert [run["loss"] for run in found] == [3.0, 4.0]
    assert "the first 1 of 4 runs; `--limit 0` lists all" in windlass("runs", "--limit", "1").stdout
    assert "matches the filter" in windlass("runs", "loss > 100").stdout


def test_a_wrong_filter_is_one_sentence_and_exit_code_2(windlass: Windlass, tmp_path: Path):
    make(tmp_path / "runs", "gpt-tiny")
    wrong = windlass("runs", "modle = 'x'")
    assert wrong.returncode == 2
    assert "no run has `modle`" in wrong.stderr
    assert "did you mean `model`?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_tags_notes_and_marks_are_found_again(windlass: Windlass, tmp_path: Path):
    first, second = (make(tmp_path / "runs", name) for name in ("gpt-one", "gpt-two"))
    assert "#good" in windlass("runs", "tag", first.name, "good", "kept").stdout
    windlass("runs", "tag", first.name, "--remove", "kept")
    windlass("runs", "note", first.name, "a fine curve")
    windlass("runs", "mark-broken", second.name, "--note", "the disk was full")
    picked = "tag = 'good' and tag != 'kept' and note like '%fine%' or broken = true"
    listed = windlass("runs", picked).stdout
    assert "#good" in listed
    assert "marked broken" in listed
    assert windlass("runs", "archive", first.name, second.name).returncode == 0
    assert "all 2 runs in `runs` are archived" in windlass("runs").stdout
    assert "gpt-two" in windlass("runs", "--archived").stdout
    windlass("runs", "archive", second.name, "--undo")
    assert "gpt-one" not in windlass("runs").stdout
    assert windlass("runs", "tag", first.name).returncode == 2


def test_runs_are_exported_as_csv(windlass: Windlass, tmp_path: Path):
    make(tmp_path / "runs", "gpt-tiny", 2.5)
    exported = windlass("runs", "export", "table.csv", "loss < 3")
    assert exported.returncode == 0, exported.stderr
    with (tmp_path / "table.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["model"], line["loss"]) == ("gpt-tiny", "2.5")
