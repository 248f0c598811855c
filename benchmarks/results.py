"""Appends rows to `benchmarks/results/<question>.csv`, with date, commit, machine and torch."""

import csv
import datetime as dt
import platform
import subprocess
from pathlib import Path

import torch


def append_row(question: str, **values: object) -> None:
    """Appends `values` after date, commit, processor and torch version, with a header if new."""
    path = Path(__file__).parent / "results" / f"{question}.csv"
    row = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": commit(),
        "machine": processor(),
        "torch": torch.__version__,
        **values,
    }
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def commit() -> str:
    """The short name of the checked-out commit, followed by `+` if the tree has changes."""
    folder = Path(__file__).parent
    name = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return name.stdout.strip() or "unknown"


def processor() -> str:
    """The processor's name and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x {torch.get_num_threads()}"
