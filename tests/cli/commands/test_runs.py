"""`windlass runs` and `show` with run folders of another format."""

from pathlib import Path

from command_line import Windlass
from windlass.tracking.run_folder import ID_FILE, create_run_folder


def make(root: Path, name: str) -> Path:
    with create_run_folder(root, name, documents={}, meta={"model": name}) as run:
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
