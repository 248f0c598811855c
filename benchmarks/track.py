"""What one log call costs beside other trackers, how quickly it is read back, and what is lost.

    python benchmarks/track.py [--peers VENV/bin/python] [--steps 10000] [--kills 1000]

Every contestant logs ten numbers a step in a process of its own, rounds in turn: the journal, a
line of JSON in one write call, `windlass.init(...).log`, and W&B offline, MLflow (SQLite) and
Trackio under the Python of another environment. Then processes that log are killed at random
moments, and rows that they had reported and that the file lacks are counted; journals of 10,000
rows are read with a flipped bit and with a missing end; and a run of many ranks is opened.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VALUES = {f"number{i}": i * 1.1 for i in range(10)}
OWN = ("journal", "json", "windlass.init")
PEERS = ("wandb", "mlflow", "trackio")
MLFLOW_SHARE = 0.1
"""MLflow takes milliseconds a call, and logs this share of the steps."""
ROUNDS = 3
FLIPS, TRUNCATIONS = 200, 400

Log = Callable[[int], None]


@contextlib.contextmanager
def journal_log(folder: Path) -> Iterator[Log]:
    """A row of the journal."""
    from windlass.tracking import JournalWriter

    with JournalWriter(folder / "0.1.j") as journal:
        yield lambda step: journal.append_row(step, VALUES)


@contextlib.contextmanager
def json_log(folder: Path) -> Iterator[Log]:
    """A line of JSON, in one write call."""
    file = os.open(folder / "plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(step: int) -> None:
        os.write(file, (json.dumps({"step": step, "time": time.time(), **VALUES}) + "\n").encode())

    yield log
    os.close(file)


@contextlib.contextmanager
def own_run_log(folder: Path) -> Iterator[Log]:
    """A run of a loop that is not Windlass's own."""
    import windlass

    with windlass.init(config={"lr": 1e-3}, root=folder) as run:
        yield lambda step: run.log(VALUES, step=step)


@contextlib.contextmanager
def wandb_log(folder: Path) -> Iterator[Log]:
    """A run of W&B that is kept on disk."""
    import wandb

    with wandb.init(project="track", mode="offline", dir=folder) as run:
        yield lambda step: run.log(VALUES, step=step)


@contextlib.contextmanager
def mlflow_log(folder: Path) -> Iterator[Log]:
    """A run in MLflow's SQLite store."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    with mlflow.start_run():
        yield lambda step: mlflow.log_metrics(VALUES, step=step)


@contextlib.contextmanager
def trackio_log(folder: Path) -> Iterator[Log]:
    """A run in Trackio's local store."""
    import trackio

    del folder  # `TRACKIO_DIR` names it
    trackio.init(project="track")
    yield lambda step: trackio.log(VALUES, step=step)
    trackio.finish()


CONTESTANTS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Log]]] = {
    "journal": journal_log,
    "json": json_log,
    "windlass.init": own_run_log,
    "wandb": wandb_log,
    "mlflow": mlflow_log,
    "trackio": trackio_log,
}


def child(name: str, folder: Path, steps: int) -> None:
    """Logs all steps of one contestant, and prints the microseconds of each call."""
    microseconds = []
    with CONTESTANTS[name](folder) as log:
        for step in range(1, steps + 1):
            start = time.perf_counter_ns()
            log(step)
            microseconds.append((time.perf_counter_ns() - start) / 1000)
    sys.stdout.write("\n" + json.dumps(microseconds) + "\n")


def call_costs(python: str, name: str, steps: int, folder: Path) -> list[float]:
    """Microseconds of each call of one contestant in a new process; empty if it fails."""
    place = Path(tempfile.mkdtemp(dir=folder))
    offline = {"WANDB_SILENT": "true", "TRACKIO_DIR": str(place), "HF_HUB_OFFLINE": "1",
               "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
               "GIT_PYTHON_REFRESH": "quiet"}  # fmt: skip
    count = round(steps * MLFLOW_SHARE) if name == "mlflow" else steps
    done = subprocess.run(
        [python, __file__, "--child", name, "--folder", str(place), "--steps", str(count)],
        env=os.environ | offline, cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(f"{name} failed: {done.stderr[-400:]}\n")
        return []
    costs: list[float] = json.loads(done.stdout.splitlines()[-1])
    return costs


def kill_one(path: Path, seed: int) -> int:
    """Rows that a process had reported when it was killed, and that its journal lacks."""
    from windlass.tracking import JournalWriter, read_journal

    reader, writer = os.pipe()
    process = os.fork()
    if not process:  # the child, which never returns
        journal = JournalWriter(path)
        for step in range(1, 2**31):
            journal.append_row(step, VALUES)
            os.write(writer, struct.pack("<q", step))
    os.close(writer)
    with os.fdopen(reader, "rb") as reports:
        reports.read(8)
        time.sleep(random.Random(seed).uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        reported = len(reports.read()) // 8 + 1
    steps = {row.step for row in read_journal(path).rows}
    path.unlink()
    return len(set(range(1, reported + 1)) - steps)


def write_journal(path: Path, rows: int, names: int = 10) -> bytes:
    """Writes a journal and returns its content."""
    from windlass.tracking import JournalWriter

    values = {f"number{i}": i * 1.1 for i in range(names)}
    with JournalWriter(path) as journal:
        for step in range(1, rows + 1):
            journal.append_row(step, values)
    return path.read_bytes()


def damaged_rows(folder: Path, rows: int) -> tuple[int, int, int]:
    """Least rows read after a flip, faults that were not named, whole rows lost by a cut."""
    from windlass.tracking import parse_journal

    content = write_journal(folder / "damaged.j", rows)
    bits = random.Random(1)
    least, unnamed = rows, 0
    for _ in range(FLIPS):
        damaged, at = bytearray(content), bits.randrange(len(content))
        damaged[at] ^= 1 << bits.randrange(8)
        journal = parse_journal(bytes(damaged))
        least = min(least, len(journal.rows))
        unnamed += not any(at in skipped for skipped in journal.skipped)
    row_bytes = 11 + 16 + 8 * len(VALUES)
    lost = 0
    for cut in range(1, TRUNCATIONS + 1):
        journal = parse_journal(content[:-cut])
        lost = max(lost, rows - -(-cut // row_bytes) - len(journal.rows))
        unnamed += journal.unread_bytes != -cut % row_bytes
    return least, unnamed, lost


def read_seconds(folder: Path, rows: int, ranks: int) -> tuple[float, float]:
    """Seconds to read all series of one rank, the median of 15; and of a run of many ranks."""
    from windlass.tracking import journal_path, journal_ranks, read_series

    write_journal(journal_path(folder / "one", 0, 1), rows)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        assert len(read_series(folder / "one")["number0"]) == rows
        times.append(time.perf_counter() - start)
    first = journal_path(folder / "many", 0, 1)
    content = write_journal(first, 2000, names=25)
    for rank in range(1, ranks):
        journal_path(folder / "many", rank, 1).write_bytes(content)
    start = time.perf_counter()
    opened = [read_series(folder / "many", rank) for rank in journal_ranks(folder / "many")]
    seconds = time.perf_counter() - start
    assert len(opened) == ranks
    return statistics.median(times), seconds


def main() -> None:
    """Measures, prints and appends a row for each contestant and one for the journal's reader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="Python of an environment with wandb, mlflow and trackio")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--child", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options.steps)
        return
    from results import append_row

    pythons = dict.fromkeys(OWN, sys.executable)
    pythons |= dict.fromkeys(PEERS, options.peers) if options.peers else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        costs: dict[str, list[list[float]]] = {contestant: [] for contestant in pythons}
        for _ in range(ROUNDS):
            for contestant, python in pythons.items():
                found = call_costs(python, contestant, options.steps // ROUNDS, folder)
                costs[contestant] += [found] if found else []
        for contestant, rounds in costs.items():
            if rounds:
                report_costs(contestant, rounds, append_row)
        lost = sum(kill_one(folder / f"{seed}.j", seed) for seed in range(options.kills))
        least, unnamed, cut = damaged_rows(folder, options.steps)
        one, many = read_seconds(folder, options.steps, options.ranks)
    append_row(
        "track_reader", steps=options.steps, kills=options.kills, lost_rows=lost,
        flips=FLIPS, least_rows_after_flip=least, faults_not_named=unnamed,
        whole_rows_lost_by_cut=cut, read_ms=round(one * 1e3, 2), ranks=options.ranks,
        open_ranks_s=round(many, 2),
    )  # fmt: skip
    sys.stdout.write(
        f"{options.kills} kills: {lost} reported rows lost\n"
        f"{FLIPS} flipped bits: at least {least} of {options.steps} rows read\n"
        f"{TRUNCATIONS} cuts: {cut} rows lost that were whole; faults not named: {unnamed}\n"
        f"{options.steps} rows of 10 values read in {one * 1e3:.2f} ms, "
        f"{options.ranks} ranks of 2000 steps in {many:.2f} s\n"
    )


def report_costs(
    contestant: str, rounds: list[list[float]], append_row: Callable[..., None]
) -> None:
    """Prints and appends the cost of a call of one contestant."""
    calls = [cost for costs in rounds for cost in costs]
    medians = [statistics.median(costs) for costs in rounds]
    row = {
        "calls": len(calls),
        "p50_us": round(statistics.median(calls), 2),
        "lowest_p50_us": round(min(medians), 2),
        "highest_p50_us": round(max(medians), 2),
        "p99_us": round(statistics.quantiles(calls, n=100)[98], 1),
    }
    append_row("track", contestant=contestant, **row)
    figures = "  ".join(f"{name} {value}" for name, value in row.items())
    sys.stdout.write(f"{contestant:14} {figures}\n")


if __name__ == "__main__":
    main()
