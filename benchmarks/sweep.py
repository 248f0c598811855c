"""Does a sweep survive its driver? 100 tiny runs on all cores, its driver killed at random moments.

    python benchmarks/sweep.py FOLDER [--trials 100] [--kills 5] [--only NAME] [--for SECONDS]

Drives two sweeps of the same search through the command line: `killed`, whose driver is killed with
SIGKILL at random moments and started again with the same command, and `undisturbed`. It prints, and
appends to results/sweep.csv: whether each trial is in the record once and none is left running,
whether both sweeps pruned the same trials at the same steps, how busy the cores were, and the most
memory that all trials had together beside what was predicted. With `--for` each ends after so many
seconds, with the runs that go on then, and goes on when it is called again.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from results import append_row
from windlass import load_sweep
from windlass.record import Catalog, RunQuery

SEARCH = (
    "gpt-tiny", "model.layers=1", "model.width=32", "model.heads=2", "model.vocabulary=257",
    "data.tokenizer=byte", "train.sequence=32", "train.batch=4", "train.evaluate_sequences=4",
    "precision=float32", "compile=false", "batch.micro=2", "train.steps=100",
    "train.learning_rate=1e-5..1e-1:log", "train.weight_decay=0.0..0.3", "train.seed=1..3",
)  # fmt: skip
SAMPLE_SECONDS = 0.2
TRIAL = "trial_process"


@dataclass
class Load:
    """What the cores and the trials did while a thread looked."""

    busy_seconds: float = 0.0
    """Of all cores together, whoever used them."""
    core_seconds: float = 0.0
    most_bytes: int = 0
    """Most resident memory of all trials together."""
    most_jobs: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Looks until it is stopped."""
        before = psutil.cpu_times()
        while not self._stop.wait(SAMPLE_SECONDS):
            now = psutil.cpu_times()
            idle = now.idle - before.idle + now.iowait - before.iowait
            total = sum(now[:8]) - sum(before[:8])
            self.core_seconds += total
            self.busy_seconds += total - idle
            before = now
            sizes = [size for size in map(resident_bytes, trial_processes()) if size]
            self.most_bytes = max(self.most_bytes, sum(sizes))
            self.most_jobs = max(self.most_jobs, len(sizes))

    def stop(self) -> None:
        """Ends the look."""
        self._stop.set()


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of a process; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def trial_processes() -> list[psutil.Process]:
    """The processes of all trials on this machine."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(TRIAL in word for word in words[:4]):
            found.append(process)
    # Between fork and exec a child of a trial has the trial's words.
    numbers = {process.pid for process in found}
    return [process for process in found if process_parent(process) not in numbers]


def process_parent(process: psutil.Process) -> int:
    """The number of the process that started another; 0 if that has ended."""
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0


def command(root: Path, name: str, trials: int) -> tuple[str, ...]:
    """The command line of a sweep, the same each time."""
    options = (
        "--sampler", "random", "--pruner", "median", "--trials", str(trials), "--name", name,
        "--runs", str(root),
    )  # fmt: skip
    return (sys.executable, "-m", "windlass", "sweep", *SEARCH, *options)


def drive(root: Path, name: str, trials: int, *, kills: int, until: float, seed: int) -> Load:
    """Drives a sweep until its end or a time, and kills its driver now and then."""
    load = Load()
    thread = threading.Thread(target=load.watch, daemon=True)
    thread.start()
    chance = random.Random(seed)
    try:
        while time.monotonic() < until:
            driver = subprocess.Popen(command(root, name, trials), stdout=subprocess.DEVNULL)
            left = until - time.monotonic()
            wait = min(left, chance.uniform(3, 25)) if kills else left
            try:
                driver.wait(wait)
                break
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()
                kills -= 1
    finally:
        load.stop()
        thread.join()
    while trial_processes():
        time.sleep(SAMPLE_SECONDS)
    return load


def outcome(root: Path, name: str) -> tuple[list[tuple[str, int | None]], int, int, int]:
    """State and rung of each trial, runs in the record, trials left, predicted bytes of a trial."""
    sweep = load_sweep(name, root=root)
    with Catalog.open(root) as catalog:
        catalog.refresh()
        rows = catalog.rows(RunQuery(filter=f'group = "{name}"'))
    ended = [(trial.state, trial.pruned_at) for trial in sweep.trials]
    left = sum(not trial.is_done for trial in sweep.trials) + sweep.request.total - len(ended)
    return ended, len(rows), left, max(trial.predicted_bytes or 0 for trial in sweep.trials)


def main() -> None:
    """Drives both sweeps, or one of them, and prints what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--only", choices=("killed", "undisturbed"))
    parser.add_argument("--for", dest="seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for name in (given.only,) if given.only else ("killed", "undisturbed"):
        root, began = given.folder / name, time.monotonic()
        kills = given.kills if name == "killed" else 0
        until = began + given.seconds
        load = drive(root, name, given.trials, kills=kills, until=until, seed=given.seed)
        ended, runs, left, predicted = outcome(root, name)
        row = {
            "sweep": name,
            "kills": kills,
            "trials": given.trials,
            "in_record": runs,
            "left": left,
            "pruned": sum(state == "pruned" for state, _ in ended),
            "failed": sum(state == "failed" for state, _ in ended),
            "seconds": round(time.monotonic() - began, 1),
            "busy": round(load.busy_seconds / load.core_seconds, 3),
            "most_jobs": load.most_jobs,
            "most_mib": round(load.most_bytes / 2**20),
            "predicted_mib": round(predicted * load.most_jobs / 2**20),
        }
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        append_row("sweep", **row)
    if all((given.folder / name).is_dir() for name in ("killed", "undisturbed")):
        both = [outcome(given.folder / name, name)[0] for name in ("killed", "undisturbed")]
        done = ("finished", "pruned", "failed")
        pairs = [pair for pair in zip(*both, strict=False) if {pair[0][0], pair[1][0]} <= {*done}]
        same = sum(one == other for one, other in pairs)
        print(f"{same} of {len(pairs)} trials that ended in both sweeps ended the same way")


if __name__ == "__main__":
    main()
