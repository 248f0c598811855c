"""Which constants make the laws of step time and memory hold: fits them from published tables.

    python benchmarks/calibrate.py TABLES [--seed 7] [--into FOLDER]

TABLES is a folder of tables (`windlass validate` tells their columns). Writes one file a stack into
`src/windlass/published/fitted`, with the rows that it was fitted from. Takes half a minute.
"""

import argparse
import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

import windlass
from windlass.validation.csv_table import TableRow, read_table
from windlass.validation.fitting.calibrate import FittedConstants, calibration_runs, fit_stack
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs
from windlass.validation.software_stacks import FOLDER, stack_catalog
from windlass.validation.stack_constants import prior_constants

_LEANING = 0.5
"""Of a prior's spread, how far a constant may move from that of the stack that this one is like."""
EIGHT_BITS = {"float8", "cast", "cast_rows"}
CONTEXT = {"context_part", "parted", "covered", "gather_shown"} | EIGHT_BITS
SLICED = {"pairs", "slices_inside", "latency", "hop", "selective", "odd_width", "covered", "inner"}
HOST = {"launch", "launch_back", "pairs", "slices_inside"}
"""Of runs that are too large for their host to be what they wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One stack's fit."""

    stack: str
    rows: dict[str, int]
    """Table -> rows to take of each stack in `of`."""
    of: tuple[str, ...] = ()
    """Stacks whose rows count; empty means its own."""
    only: str = ""
    """A pattern that a row's `source` or `system` must have; empty takes all."""
    still: set[str]
    """Constants that these tables say nothing of, or that another one stands for."""
    spreads: dict[str, float] = field(default_factory=dict)
    """Constant -> factor on its prior's spread."""


MOSAIC = tuple(f"mosaic-{name}" for name in ("h100-80gb", "a100-80gb", "a100-40gb"))
FOUNDRY = {"llm_foundry_mpt.csv": 20}
MLPERF = "mlperf_bert_resnet_v1.0_v1.1_v2.0.csv"
UNSLICED = SLICED | {"whole_bytes", "gradient_bytes", "context_part", "parted"} | EIGHT_BITS

JOBS = (
    Job(
        stack="vtrain",
        rows={"vtrain_single_a100.csv": 100, "vtrain_multi_a100.csv": 27},
        still=CONTEXT | {"selective", "odd_head", "odd_width", "sum_shown"},
    ),
    Job(
        stack="bloom",
        rows={"bigscience_bloom_prequel_a100_80gb.csv": 18},
        still=CONTEXT | HOST | {"selective", "sum_shown"},
        spreads={
            "cards": 1.5,
            "crowded": 2.0,
            "earlier": 2.0,
            "hop": 1.5,
            "inner": 2.0,
            "odd_head": 1.5,
            "odd_width": 1.5,
        },
    ),
    Job(
        stack="megatron-2021",
        rows={"megatron_sc21.csv": 8},
        still=CONTEXT | HOST | {"selective", "sum_shown", "odd_head", "odd_width"},
        spreads={"cards": 1.0, "hop": 1.0, "stragglers": 1.0},
    ),
    Job(
        stack="megatron-2022",
        rows={"korthikanti_2022.csv": 4},
        still=CONTEXT | HOST | {"sum_shown", "odd_head", "odd_width"},
        spreads={"cards": 1.0, "hop": 1.0, "stragglers": 1.0},
    ),
    Job(
        stack="deepspeed-zero3",
        rows={"megatron_sc21.csv": 3},
        still=SLICED | HOST | EIGHT_BITS | {"odd_head", "context_part", "parted", "sum_shown"},
        spreads={"cards": 1.0, "gather_shown": 1.0, "stragglers": 1.0},
    ),
    Job(stack="fsdp", rows=FOUNDRY, of=MOSAIC, still=UNSLICED),
    *(Job(stack=name, rows=FOUNDRY, still=UNSLICED) for name in MOSAIC),
    Job(
        stack="torchtitan",
        rows={"torchtitan.csv": 12},
        still=HOST | {"selective", "odd_head", "odd_width", "hop", "gradient_bytes"},
        spreads={"products": 2.0},  # what 500 W leave of a peak is less sure than what 700 W do
    ),
    Job(
        stack="mlperf-bert",
        rows={MLPERF: 18},
        still=SLICED | CONTEXT | {"odd_head"},
        spreads={"sum_shown": 3.0},
    ),
    Job(stack="popart-bert", rows={MLPERF: 4}, only="popart", still=set()),
    Job(stack="images-pods", rows={MLPERF: 4}, still=set()),
    Job(stack="images-gpus", rows={MLPERF: 18}, still=set()),
    Job(stack="streams", rows={"cerebras.csv": 2}, still=set()),
    Job(
        stack="graphcore-bert",
        rows={"graphcore_performance.csv": 16},
        still=set(),
        spreads={"fixed": 1.5},  # frameworks differ in what their host does between two steps
    ),
)


def main() -> None:
    """Reads the command line and fits every stack, those that others begin from first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--into", type=Path, default=FOLDER / "fitted")
    asked = parser.parse_args()
    done: dict[str, Mapping[str, float]] = {}
    for job in JOBS:
        found, said = fitted_job(job, asked.tables, asked.seed, done)
        done[job.stack] = found.constants
        _write(asked.into / f"{job.stack}.toml", job, found, said, asked.seed)
        print(
            f"{job.stack:20} {len(found.rows):4} rows, 80 % within x{found.step_spread:.3f} of "
            f"step time and x{found.memory_spread:.3f} of memory"
        )


def fitted_job(
    job: Job, tables: Path, seed: int, done: Mapping[str, Mapping[str, float]]
) -> tuple[FittedConstants, str]:
    """What a job's rows make of its constants, and which rows those are.

    Args:
        job: what to fit.
        tables: the folder of tables.
        seed: that decides from where on rows are taken.
        done: constants of stacks that were fitted before.
    """
    runs, said = _rows(job, tables, seed)
    known = stack_catalog().stack(job.stack)
    begin: Mapping[str, float] = prior_constants(job.stack)
    if known.like:
        begin = {**done[known.like], **known.fixed_constants}
    found = fit_stack(
        job.stack, runs, begin, still=frozenset(job.still), spreads=job.spreads,
        tight=_LEANING if known.like else 1.0,
    )  # fmt: skip
    return found, said


def _rows(job: Job, tables: Path, seed: int) -> tuple[list[PublishedRun], str]:
    runs: list[PublishedRun] = []
    said: list[str] = []
    for name, count in job.rows.items():
        rows = [row for row in read_table(tables / name).rows if _meant(row, job.only)]
        found = [
            run for run in rows_to_runs(rows, stack_catalog()) if isinstance(run, PublishedRun)
        ]
        for stack in job.of or (job.stack,):
            mine = [run for run in found if run.stack == stack]
            usable = [run for run in mine if run.step_seconds or run.peak_bytes]
            some = calibration_runs(usable, count, seed)
            said.append(f"{len(some)} of {len(mine)} rows of {name}")
            runs += some
    return runs, " and ".join(dict.fromkeys(said))


def _meant(row: TableRow, pattern: str) -> bool:
    return bool(re.search(pattern, f"{row.text('source')} {row.text('system')}", re.IGNORECASE))


def _write(path: Path, job: Job, found: FittedConstants, said: str, seed: int) -> None:
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
