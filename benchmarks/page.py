"""How long the server of 1,000 runs of 10,000 steps takes to answer, and its page to be usable.

    python benchmarks/page.py [--runs 1000] [--rows 10000] [--folder FOLDER]

The store is that of `benchmarks/record.py`. `windlass serve` runs in a process of its own. A view
is usable once it has drawn what it shows; each is opened in a Chromium without a cache. MLflow 3.17
on the same data takes 450 ms for a table of 1,000 runs and 570 ms for 20 curves, and its page of
100 runs 2.4 s.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

from browser import CHROMIUM, Browser, browser

from record import CURVES, FILTER, make_store
from results import append_row

TIMES, OPENED = 31, 7


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Median time of a call."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def times_of_answers(link: str) -> tuple[dict[str, float], list[str]]:
    """Milliseconds of each answer of the API, and the ids of the runs for the curves."""
    parts = urlsplit(link)
    headers = {"Authorization": f"Bearer {parts.fragment.removeprefix('token=')}"}
    with closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as client:

        def ask(path: str) -> bytes:
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            return content

        found = json.loads(ask(f"/api/runs?columns=id&limit={CURVES}"))
        ids = [row[0] for row in found["rows"]]
        paths = {
            "table_ms": "/api/runs?limit=1000",
            "filter_ms": f"/api/runs?limit=1000&filter={quote(FILTER)}",
            "curves_ms": f"/api/curves?ids={','.join(ids)}&names=loss",
            "run_ms": f"/api/runs/{ids[0]}",
        }
        return {name: milliseconds(partial(ask, path), TIMES) for name, path in paths.items()}, ids


def times_of_views(page: Browser, link: str, ids: list[str]) -> dict[str, float]:
    """Seconds until each view is usable."""
    page.open(link)
    server = link.partition("/#")[0]
    overlay = f"compare?ids={','.join(ids)}"
    views = {"runs_s": "runs", "overlay_s": overlay, "run_s": f"run/{ids[0]}"}

    def show(place: str) -> None:
        page.call("Network.clearBrowserCache")
        page.open(f"{server}/#/{place}")

    times = {name: milliseconds(partial(show, place), OPENED) for name, place in views.items()}
    assert page.errors() == []
    return {name: value / 1e3 for name, value in times.items()}


def main() -> None:
    """Measures, prints and appends one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the store is, or is made and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch) / "runs"
        if not root.is_dir() or not any(root.iterdir()):
            make_store(root, options.runs, options.rows)
        command = (sys.executable, "-m", "windlass", "serve", str(root), "--port", "0")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                link = server.stdout.readline().strip()
                row, ids = times_of_answers(link)
                if CHROMIUM is not None:
                    with browser(Path(scratch) / "profile") as page:
                        row |= times_of_views(page, link, ids)
            finally:
                server.terminate()
    for name, value in row.items():
        sys.stdout.write(f"{name:12s} {value:8.2f}\n")
    numbers = {name: round(value, 3) for name, value in row.items()}
    append_row("page", runs=options.runs, rows=options.rows, **numbers)


if __name__ == "__main__":
    main()
