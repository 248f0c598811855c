"""Draws the pictures of runs in `docs/images`: those of the page, and the README's step.

    python scripts/page_pictures.py [--folder FOLDER]

It needs Chromium, and a machine that does nothing else. It trains what is shown, in a few minutes:
a run of the README's model, a sweep, two seeds, two ranks, and a rate that is far too high.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

from windlass.report import write_png

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

from browser import Browser, browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SMALL = (
    "gpt-tiny", "model.layers=2", "model.width=64", "model.heads=2", "train.sequence=64",
    "train.batch=8", "train.evaluate_every=20", "data.limit_bytes=300000", "compile=false",
)  # fmt: skip
STEPS, STEP = "train.steps=100", "readme"
DESKTOP, PHONE = (1280, 820), (390, 780)


def windlass(*words: str, runs: Path) -> None:
    """Runs a command line on the folder of runs."""
    command = [sys.executable, "-m", "windlass", *words, "--runs", str(runs)]
    subprocess.run(command, check=True, cwd=runs.parent)


def make_runs(runs: Path) -> None:
    """Trains what the pictures show."""
    windlass("train", "gpt-tiny", "train.steps=40", "--folder", str(runs / STEP), runs=runs)
    rates = "train.learning_rate=3e-4,1e-3,3e-3,1e-2"
    windlass("sweep", *SMALL, STEPS, rates, "--name", "rates", runs=runs)
    for seed in (1, 2):
        windlass("train", *SMALL, STEPS, f"train.seed={seed}", runs=runs)
    windlass("train", *SMALL, STEPS, "train.learning_rate=0.3", "train.clip=100", runs=runs)
    windlass("runs", "mark-broken", "last", "--note", "the rate is a slip of the pen", runs=runs)
    windlass("train", *SMALL, STEPS, "parallel.data=2", runs=runs)
    windlass("judge", "last", runs=runs)


def draw_step(report: str) -> None:
    """Keeps a picture of one step, predicted above measured, from the report of a run."""
    style = re.search(r"<style>.*?</style>", report, re.DOTALL)
    figures = re.findall(r"<svg.*?</svg>", report, re.DOTALL)
    (step,) = (each for each in figures if "predicted above measured" in each)
    size = re.search(r'viewBox="0 0 (\S+) (\S+)"', step)
    assert style is not None
    assert size is not None
    width, height = (round(float(each)) for each in size.groups())
    write_png(style[0] + step, IMAGES / "step.png", width=width, height=height)


def draw(page: Browser, link: str, ids: list[str]) -> None:
    """Opens each view, and keeps a picture of it."""
    server = link.partition("/#")[0]
    few = ",".join(ids[:6])
    views = {
        "table": ("runs", DESKTOP), "overlay": (f"compare?ids={few}&smooth=0.5", DESKTOP),
        "diff": (f"diff?ids={ids[0]},{ids[2]}", DESKTOP), "run": (f"run/{ids[0]}", DESKTOP),
        "phone": ("runs", PHONE),
    }  # fmt: skip
    page.open(link)
    for name, (place, (width, height)) in views.items():
        page.open(f"{server}/#/{place}", width=width, height=height)
        page.screenshot(IMAGES / f"record-{name}.png")


def ids_of(link: str) -> list[str]:
    """The ids of all runs, the newest first."""
    server, _, token = link.partition("/#token=")
    request = Request(f"{server}/api/runs?columns=id", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request) as answer:
        return [row[0] for row in json.load(answer)["rows"]]


def main() -> None:
    """Makes the runs, if the folder has none, and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the runs are, or are made and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = (options.folder or Path(scratch)).resolve() / "runs"
        if not runs.is_dir():
            runs.mkdir(parents=True)
            make_runs(runs)
        draw_step((runs / STEP / "report.html").read_text())
        command = (sys.executable, "-m", "windlass", "serve", str(runs), "--port", "0")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                link = server.stdout.readline().strip()
                with browser(Path(scratch) / "profile") as page:
                    draw(page, link, ids_of(link))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
