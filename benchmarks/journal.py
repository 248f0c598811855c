"""What does journalling a step cost, against one line of JSON in one write call?

Both log ten numbers a step, interleaved in blocks; then a process that logs is killed at a random
moment, and rows that it had told but that the file lacks are counted.

Run: `python benchmarks/journal.py [--steps 10000]`; appends a row to results/journal.csv.
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
from windlass.tracking.journal import JournalWriter, read_journal

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
    journal.row(step, {"loss": 1.0 / step, "seconds": 0.1})
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    time.sleep(0.001)
"""


def costs(log: Callable[[int], None], steps: range) -> list[float]:
    """Microseconds of each call."""
    spent = []
    for step in steps:
        begin = time.perf_counter_ns()
        log(step)
        spent.append((time.perf_counter_ns() - begin) / 1000)
    return spent


def lost_rows(folder: Path, seed: int) -> int:
    """Rows that a killed process had told and that its journal lacks."""
    path = folder / f"{seed}.1.j"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        told = int([line for line in process.stdout if line.endswith("\n")][-1])
    return max(0, told - read_journal(path).rows[-1].step)


def main() -> None:
    """Measures, prints and appends one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    arguments = parser.parse_args()
    values = {f"number{i}": i * 1.1 for i in range(10)}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as text:
        folder = Path(text)
        journal = JournalWriter(folder / "0.1.j")
        plain = os.open(folder / "plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def log_plain(step: int) -> None:
            line = json.dumps({"step": step, "time": time.time(), **values}) + "\n"
            os.write(plain, line.encode())

        ours: list[float] = []
        theirs: list[float] = []
        for first in range(0, arguments.steps, BLOCK):
            steps = range(first, min(first + BLOCK, arguments.steps))
            ours += costs(lambda step: journal.append_row(step, values), steps)
            theirs += costs(log_plain, steps)
        journal.close()
        os.close(plain)
        begin = time.perf_counter()
        rows = len(read_journal(folder / "0.1.j").rows)
        read_seconds = time.perf_counter() - begin
        assert rows == arguments.steps
        size = (folder / "0.1.j").stat().st_size
        lost = [lost_rows(folder, seed) for seed in range(1, arguments.kills + 1)]
    commit, dirty = code_version(Path(windlass.__file__))
    row = {
        "commit": f"{(commit or '')[:12]}{'+' if dirty else ''}",
        "date": datetime.now(tz=UTC).strftime("%Y-%m-%d"),
        "machine": f"{processor_name()}, {len(os.sched_getaffinity(0))} threads, {platform.system()}",
        "steps": arguments.steps,
        "journal_p50_us": round(statistics.median(ours), 2),
        "journal_p99_us": round(statistics.quantiles(ours, n=100)[98], 2),
        "jsonl_p50_us": round(statistics.median(theirs), 2),
        "jsonl_p99_us": round(statistics.quantiles(theirs, n=100)[98], 2),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "bytes_per_row": round(size / arguments.steps, 1),
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
