"""Which constants make the laws of step time and memory hold: fits them from published tables.

    python benchmarks/calibrate.py TABLES [--seed 7] [--into FOLDER]

TABLES is a folder of tables (`windlass validate` tells their columns). Writes one file a stack into
`src/windlass/published/fitted`, with the rows that it was fitted from. Takes half a minute.
"""

import argparse
import datetime as dt
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

import windlass
from windlass.published.calibrate import Fitted, calibrate, taken
from windlass.published.constants import calibration
from windlass.published.express import express
from windlass.published.run import Run
from windlass.published.stacks import FOLDER, catalogue
from windlass.published.table import read_table

CONTEXT = {"context_part", "covered", "float8", "float8_rows", "gather_shown"}
SLICED = {"pairs", "slices_inside", "latency", "hop", "selective", "odd_width", "inner"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One stack's fit."""

    stack: str
    rows: dict[str, int]
    """Table -> rows to take of this stack."""
    still: set[str]
    """Constants that these tables say nothing of, or that another one stands for."""
    tight: dict[str, float] = field(default_factory=dict)
    """Constant -> factor on its prior's spread."""


JOBS = (
    Job(
        stack="vtrain",
        rows={"vtrain_single_a100.csv": 100, "vtrain_multi_a100.csv": 27},
        still=CONTEXT | {"selective", "odd_head", "odd_width", "sum_shown"},
    ),
    Job(
        stack="bloom",
        rows={"bigscience_bloom_prequel_a100_80gb.csv": 18},
        still=CONTEXT
        | {"selective", "launch", "launch_back", "pairs", "slices_inside", "sum_shown"},
        tight={"cards": 1.5, "hop": 1.5, "stragglers": 1.5, "odd_head": 1.5, "odd_width": 1.5},
    ),
)


def main() -> None:
    """Reads the command line and fits every stack, those that others begin from first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--into", type=Path, default=FOLDER / "fitted")
    parser.add_argument("--only", nargs="*")
    asked = parser.parse_args()
    for job in JOBS:
        if asked.only and job.stack not in asked.only:
            continue
        runs, said = _rows(job, asked.tables, asked.seed)
        found = calibrate(job.stack, runs, frozenset(job.still), tight=job.tight)
        _write(asked.into / f"{job.stack}.toml", job, found, said, asked.seed)
        calibration.cache_clear()
        print(
            f"{job.stack:20} {len(found.rows):4} rows, 80 % within x{found.step_spread:.3f} of "
            f"step time and x{found.memory_spread:.3f} of memory"
        )


def _rows(job: Job, tables: Path, seed: int) -> tuple[list[Run], str]:
    runs: list[Run] = []
    said: list[str] = []
    for name, count in job.rows.items():
        found = express(read_table(tables / name).rows, catalogue())
        mine = [run for run in found if isinstance(run, Run) and run.stack == job.stack]
        usable = [run for run in mine if (run.step_seconds or run.peak_bytes) and not run.choices]
        some = taken(usable, count, seed)
        said.append(f"{len(some)} of {len(mine)} rows of {name}")
        runs += some
    return runs, " and ".join(said)


def _write(path: Path, job: Job, found: Fitted, said: str, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "stack": job.stack,
        "fitted_from": f"{said}, seed {seed}",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "version": windlass.__version__,
        "rows": list(found.rows),
        "interval": {
            "step": round(found.step_spread, 4),
            "memory": round(found.memory_spread, 4),
        },
        "constants": {name: float(f"{value:.5g}") for name, value in found.constants.items()},
    }
    path.write_text(tomli_w.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
