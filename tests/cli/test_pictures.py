"""`windlass plan --picture` and `--trace`: a page, pictures or a trace of a plan."""

import json
import shutil
from pathlib import Path

import pytest

from command_line import TINY, Windlass
from windlass.errors import StorageError
from windlass.report.figures.svg import write_png

PLAN = ("plan", *(word for word in TINY if not word.startswith("train.evaluate")))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.mark.parametrize("name", ["plan.html", "plan.svg"])
def test_a_plan_is_drawn_with_all_its_pictures(windlass: Windlass, tmp_path: Path, name: str):
    done = windlass(*PLAN, "--picture", name)
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / name).read_text()
    for heading in ("Device mesh", "Predicted step time by term", "Predicted memory over"):
        assert heading in drawn
    assert "every figure is predicted" in done.stdout


def test_one_picture_may_be_drawn_alone(windlass: Windlass, tmp_path: Path):
    done = windlass(*PLAN, "--picture", "plan.svg", "--only", "waterfall")
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "plan.svg").read_text()
    assert "Predicted step time by term" in drawn
    assert "Device mesh" not in drawn


def test_if_nothing_fits_the_nearest_plan_is_drawn(windlass: Windlass, tmp_path: Path):
    done = windlass(
        "fit", *PLAN[1:], "--memory", "400KiB", "--picture", "no.svg", "--only", "memory"
    )
    assert done.returncode == 1, done.stderr
    drawn = (tmp_path / "no.svg").read_text()
    assert ": does not fit" in drawn
    assert "too much<" in drawn


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser draws a PNG here")
def test_a_png_is_drawn_by_a_browser(windlass: Windlass, tmp_path: Path):
    done = windlass(*PLAN, "--picture", "plan.png", "--only", "mesh")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_predicted_timeline_is_written_as_a_trace(windlass: Windlass, tmp_path: Path):
    done = windlass(*PLAN, "--trace", "plan.json")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    assert {"forward", "backward", "update"} <= {event["name"] for event in events}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--trace", "plan.txt"), "write `plan.json`"),
        (("--trace", "/proc/plan.json"), "/proc/plan.json"),
        (("--picture", "plan.jpg"), ".html or .svg or .png"),
        (("--picture", "plan.svg", "--only", "waterfal"), "did you mean `waterfall`"),
        (("--picture", "plan.html", "--only", "waterfall"), "a page holds all pictures"),
        (("--only", "waterfall"), "--picture FILE"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_message(
    windlass: Windlass, words: tuple[str, ...], told: str
):
    done = windlass(*PLAN, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_browser_a_png_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StorageError, match=r"write `plan\.svg` or `plan\.html`"):
        write_png("<svg/>", tmp_path / "plan.png", width=10, height=10)
