"""The cost of journaling a step, against one line of JSON in one write call.

    python benchmarks/journal.py [--steps 10000]

Both log ten numbers for each step, interleaved in blocks. Then processes that log are killed at
random moments, and rows that they had reported but that the file lacks are counted.
"""

import argparse
import csv
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import windlass
from windlass.tracking.environment import code_version, processor_name
from windlass.tracking.journal import JournalWriter
from windlass.tracking.journal_reader import read_journal

RESULTS = Path(__file__).parent / "results" / "journal.csv"
BLOCK = 500
KILLED = """
import sys, time
from pathlib import Path
from windlass.tracking.journal import JournalWriter

journal = JournalWriter(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    journal.append_row(step, {"loss": 1.0 / step, "seconds": 0.1})
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    time.sleep(0.001)
"""


def costs(log: Callable[[int], None], steps: range) -> list[float]:
    """Microseconds of each call of `log`."""
    microseconds = []
    for step in steps:
        start = time.perf_counter_ns()
        log(step)
        microseconds.append((time.perf_counter_ns() - start) / 1000)
    return microseconds


def lost_rows(folder: Path, seed: int) -> int:
    """Rows that a killed process had reported and that its journal lacks."""
    path = folder / f"{seed}.1.j"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        reported = int([line for line in process.stdout if line.endswith("\n")][-1])
    return max(0, reported - read_journal(path).rows[-1].step)


def main() -> None:
    """Measures, prints and appends one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    values = {f"number{i}": i * 1.1 for i in range(10)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        journal = JournalWriter(folder / "0.1.j")
        plain = os.open(folder / "plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def log_plain(step: int) -> None:
            line = json.dumps({"step": step, "time": time.time(), **values}) + "\n"
            os.write(plain, line.encode())

        journal_costs: list[float] = []
        jsonl_costs: list[float] = []
        for first in range(0, options.steps, BLOCK):
            steps = range(first, min(first + BLOCK, options.steps))
            journal_costs += costs(lambda step: journal.append_row(step, values), steps)
            jsonl_costs += costs(log_plain, steps)
        journal.close()
        os.close(plain)
        start = time.perf_counter()
        rows = len(read_journal(folder / "0.1.j").rows)
        read_seconds = time.perf_counter() - start
        assert rows == options.steps
        size = (folder / "0.1.j").stat().st_size
        lost = [lost_rows(folder, seed) for seed in range(1, options.kills + 1)]
    commit, dirty = code_version(Path(windlass.__file__))
    row = {
        "commit": f"{(commit or '')[:12]}{'+' if dirty else ''}",
        "date": datetime.now(tz=UTC).strftime("%Y-%m-%d"),
        "machine": f"{processor_name()}, {len(os.sched_getaffinity(0))} threads, "
        f"{platform.system()}",
        "steps": options.steps,
        "journal_p50_us": round(statistics.median(journal_costs), 2),
        "journal_p99_us": round(statistics.quantiles(journal_costs, n=100)[98], 2),
        "jsonl_p50_us": round(statistics.median(jsonl_costs), 2),
        "jsonl_p99_us": round(statistics.quantiles(jsonl_costs, n=100)[98], 2),
        "ratio": round(statistics.median(journal_costs) / statistics.median(jsonl_costs), 3),
        "bytes_per_row": round(size / options.steps, 1),
        "read_seconds": round(read_seconds, 3),
        "seed": 1,
        "kills": len(lost),
        "lost_rows": sum(lost),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
    for name, value in row.items():
        sys.stdout.write(f"{name:16} {value}\n")


if __name__ == "__main__":
    main()
