"""How long the catalogue of 1,000 runs of 10,000 steps takes to build, and to answer.

    python benchmarks/record.py [--runs 1000] [--rows 10000] [--folder FOLDER]
    python benchmarks/record.py --merge [--runs 300] [--rows 1000]

Every journal is written by the real writer, ten numbers a row. Then the catalogue is built from
nothing, asked from Python, and asked by the command line in new processes. MLflow 3.17 on the same
data takes 450 ms for a table of 1,000 runs and 570 ms for 20 curves (docs/guide/record.md).

`--merge` makes three stores that share half of their runs, some of them cut short as if they were
still going on, merges them in all six orders, and asks for one catalogue, byte for byte.
"""

import argparse
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from results import append_row
from windlass.record import Catalog, RunQuery, merge_folders
from windlass.tracking import create_run_folder

FILTER = 'model = "gpt-tiny" and loss < 5'
NAMES = (
    "loss", "gradient_norm", "learning_rate", "tokens", "seconds", "memory_bytes",
    "read_bytes", "seconds.forward", "seconds.backward", "seconds.update",
)  # fmt: skip
PLAN = """\
graph = "gpt-tiny@8c4612749166"
machine = "here@51a4b449c6f9"
precision = "bfloat16"
[parallel]
pipeline = 1
tensor = 1
data = {data}
[batch]
sequence = 256
micro = 16
"""
REQUEST = """\
[model]
name = "gpt-tiny"
[train]
steps = 10000
batch = 16
optimizer = "adamw"
learning_rate = {rate}
"""
CURVES = 20


def make_store(root: Path, runs: int, rows: int) -> None:
    """Runs as training leaves them, with invented numbers."""
    draw = random.Random(1)
    for number in range(runs):
        final = draw.uniform(2, 8)
        meta = {
            "model": ("gpt-tiny", "gpt2-124m", "gpt-j-6b")[number % 3], "machine": "here",
            "steps": rows, "predicted_seconds": 0.2, "predicted_interval": [0.15, 0.25],
        }  # fmt: skip
        with create_run_folder(root, "model", documents={}, meta=meta) as run:
            (run.path / "plan.toml").write_text(PLAN.format(data=1 + number % 4))
            (run.path / "request.toml").write_text(REQUEST.format(rate=10 ** -draw.uniform(2, 5)))
            noise = [draw.gauss(1, 0.02) for _ in range(997)]
            for step in range(1, rows + 1):
                factor = noise[step * 7 % 997]
                loss = final + (9 - final) * factor / step**0.5 if step < rows else final
                numbers = (
                    loss,
                    factor,
                    1e-3 / step,
                    4096,
                    0.2 * factor,
                    2**30,
                    0,
                    0.06,
                    0.12,
                    0.01,
                )
                run.journal.append_row(step, dict(zip(NAMES, numbers, strict=True)))
            run.end("finished")


def seconds_of(call: Callable[[], object], times: int = 1) -> float:
    """Median time of a call."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def same_as_pandas(catalog: Catalog) -> bool:
    """Whether the filter picks the runs that pandas picks from what the journals say."""
    from windlass.tracking import find_run, load_run

    picked = {row.id for row in catalog.rows(RunQuery(filter=FILTER))}
    sample = random.Random(2).sample(catalog.rows(), 20)
    frame = pd.DataFrame(
        [
            (record.id, record.meta["model"], record.steps[-1].loss)
            for record in (load_run(find_run(row.folder.parent, row.id)) for row in sample)
        ],
        columns=["id", "model", "loss"],
    )
    chosen = set(frame["id"][(frame["model"] == "gpt-tiny") & (frame["loss"] < 5)])
    return chosen == picked & set(frame["id"])


def measured(root: Path) -> dict[str, float]:
    """Milliseconds of each question, and the seconds of a build from nothing."""
    for file in root.glob(".c*.sqlite*"):
        file.unlink()
    start = time.perf_counter()
    with Catalog.open(root) as catalog:
        catalog.refresh()
    build = time.perf_counter() - start
    command = (sys.executable, "-m", "windlass", "runs", FILTER, "--runs", str(root))
    with Catalog.open(root) as catalog:
        catalog.refresh()
        assert same_as_pandas(catalog)
        ids = [row.id for row in catalog.rows()[:CURVES]]
        columns = ("id", "model", "state", "step", "loss", "seconds", "ratio", "train.batch")
        return {
            "build_s": build,
            "command_ms": 1e3 * seconds_of(
                lambda: subprocess.run(command, check=True, capture_output=True), 7
            ),
            "refresh_ms": 1e3 * seconds_of(catalog.refresh, 7),
            "table_ms": 1e3 * seconds_of(lambda: catalog.table(columns), 7),
            "rows_ms": 1e3 * seconds_of(catalog.rows, 7),
            "filter_ms": 1e3 * seconds_of(lambda: catalog.rows(RunQuery(filter=FILTER)), 7),
            "curves_ms": 1e3 * seconds_of(lambda: catalog.curves(ids, ["loss"]), 7),
            "journals_MB": sum(f.stat().st_size for f in root.glob("*/journal/*")) / 1e6,
            "catalogue_MB": sum(f.stat().st_size for f in root.glob(".c*.sqlite")) / 1e6,
        }  # fmt: skip


def share_out(root: Path, runs: int, rows: int) -> list[Path]:
    """Three stores of some runs each under `root`, two of three neighbours in two stores."""
    make_store(root / "all", 2 * runs, rows)
    folders = sorted(path for path in (root / "all").iterdir() if path.is_dir())
    stores = []
    for index, name in enumerate("abc"):
        stores.append(root / name)
        for number, folder in enumerate(folders[index * runs // 2 : index * runs // 2 + runs]):
            copy = stores[-1] / folder.name
            shutil.copytree(folder, copy, copy_function=os.link)
            if number % 3 == index:
                for journal in copy.glob("journal/*"):
                    content = journal.read_bytes()
                    journal.unlink()
                    journal.write_bytes(content[: len(content) // 2])
    return stores


def measured_merge(root: Path, runs: int, rows: int) -> dict[str, float]:
    """Seconds of a merge of three stores and of the same again, and how many catalogues result."""
    stores = share_out(root, runs, rows)
    first, again, copied, catalogues = [], [], 0, set()
    for order in itertools.permutations(stores):
        target = root / "merged"
        first.append(seconds_of(partial(merge_folders, order, target)))
        start = time.perf_counter()
        copied += merge_folders(order, target).copied_files
        again.append(time.perf_counter() - start)
        with Catalog.open(target) as catalog:
            catalog.refresh()
            catalog.write_copy(root / "copy.sqlite")
        catalogues.add((root / "copy.sqlite").read_bytes())
        (root / "copy.sqlite").unlink()
        count, size = count_files(target)
        shutil.rmtree(target)
    return {
        "merge_s": statistics.median(first), "again_s": statistics.median(again),
        "files": count, "MB": size / 1e6, "copied_again": copied, "catalogues": len(catalogues),
    }  # fmt: skip


def count_files(root: Path) -> tuple[int, int]:
    """Files of the record below a folder, and their bytes."""
    sizes = [f.stat().st_size for f in root.rglob("*") if f.is_file() and f.name[0] != "."]
    return len(sizes), sum(sizes)


def main() -> None:
    """Measures, prints and appends one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--folder", type=Path, help="where the store is, or is made and kept")
    parser.add_argument("--merge", action="store_true", help="measure merges instead")
    options = parser.parse_args()
    runs = options.runs or (300 if options.merge else 1000)
    rows = options.rows or (1000 if options.merge else 10_000)
    if options.merge:
        with tempfile.TemporaryDirectory() as folder:
            report("merge", runs, rows, measured_merge(Path(folder), runs, rows))
        return
    root = options.folder or Path(tempfile.mkdtemp())
    try:
        if not root.is_dir() or not any(root.iterdir()):
            start = time.perf_counter()
            make_store(root, runs, rows)
            sys.stdout.write(f"{runs} runs written in {time.perf_counter() - start:.0f} s\n")
        row = measured(root)
    finally:
        if options.folder is None:
            shutil.rmtree(root)
    report("record", runs, rows, row)


def report(question: str, runs: int, rows: int, row: dict[str, float]) -> None:
    """Prints a row and appends it to its table."""
    for name, value in row.items():
        sys.stdout.write(f"{name:14s} {value:10.1f}\n")
    append_row(
        question, runs=runs, rows=rows, **{name: round(value, 2) for name, value in row.items()}
    )


if __name__ == "__main__":
    main()
