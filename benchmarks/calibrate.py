"""Fits the constants of the laws of step time and memory to published tables.

    python benchmarks/calibrate.py TABLES [--seed 7] [--into FOLDER]

TABLES is a folder of tables of published runs (`docs/accuracy.md` lists their columns). The script
writes one file for each stack into `src/windlass/validation/fitted`, with the rows that it was
fitted to. It takes half a minute.
"""

import argparse
import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

import windlass
from fitting.stacks import FittedConstants, calibration_runs, fit_stack
from windlass.validation.csv_table import TableRow, read_table
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs
from windlass.validation.software_stacks import FOLDER, stack_catalog
from windlass.validation.stack_constants import prior_constants

_SIMILAR_SPREAD = 0.5
"""Factor on a prior's spread if the fit starts from the constants of a similar stack."""
FLOAT8 = {"float8", "cast", "cast_rows"}
CONTEXT = {"context_part", "parted", "covered", "gather_shown"} | FLOAT8
TENSOR_PARALLEL = {
    "pairs",
    "slices_inside",
    "latency",
    "hop",
    "selective",
    "odd_width",
    "covered",
    "inner",
}
HOST = {"launch", "launch_back", "pairs", "slices_inside"}
"""Constants of the host, not fitted to runs so large that they never wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The fit of one stack."""

    stack: str
    rows: dict[str, int]
    """Table -> rows to select for each stack in `row_stacks`."""
    row_stacks: tuple[str, ...] = ()
    """Stacks whose rows count; empty means only its own."""
    only: str = ""
    """A pattern that a row's `source` or `system` must match; empty selects all rows."""
    not_fitted: set[str]
    """Constants that these tables do not determine, or that another constant replaces."""
    spread_factors: dict[str, float] = field(default_factory=dict)
    """Constant -> factor on its prior's spread."""


MOSAIC = tuple(f"mosaic-{name}" for name in ("h100-80gb", "a100-80gb", "a100-40gb"))
FOUNDRY = {"llm_foundry_mpt.csv": 20}
MLPERF = "mlperf_bert_resnet_v1.0_v1.1_v2.0.csv"
NO_TENSOR_PARALLEL = (
    TENSOR_PARALLEL | {"whole_bytes", "gradient_bytes", "context_part", "parted"} | FLOAT8
)

JOBS = (
    Job(
        stack="vtrain",
        rows={"vtrain_single_a100.csv": 100, "vtrain_multi_a100.csv": 27},
        not_fitted=CONTEXT | {"selective", "odd_head", "odd_width", "sum_shown"},
    ),
    Job(
        stack="bloom",
        rows={"bigscience_bloom_prequel_a100_80gb.csv": 18},
        not_fitted=CONTEXT | HOST | {"selective", "sum_shown"},
        spread_factors={
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
        not_fitted=CONTEXT | HOST | {"selective", "sum_shown", "odd_head", "odd_width"},
        spread_factors={"cards": 1.0, "hop": 1.0, "stragglers": 1.0},
    ),
    Job(
        stack="megatron-2022",
        rows={"korthikanti_2022.csv": 4},
        not_fitted=CONTEXT | HOST | {"sum_shown", "odd_head", "odd_width"},
        spread_factors={"cards": 1.0, "hop": 1.0, "stragglers": 1.0},
    ),
    Job(
        stack="deepspeed-zero3",
        rows={"megatron_sc21.csv": 3},
        not_fitted=TENSOR_PARALLEL
        | HOST
        | FLOAT8
        | {"odd_head", "context_part", "parted", "sum_shown"},
        spread_factors={"cards": 1.0, "gather_shown": 1.0, "stragglers": 1.0},
    ),
    Job(stack="fsdp", rows=FOUNDRY, row_stacks=MOSAIC, not_fitted=NO_TENSOR_PARALLEL),
    *(Job(stack=name, rows=FOUNDRY, not_fitted=NO_TENSOR_PARALLEL) for name in MOSAIC),
    Job(
        stack="torchtitan",
        rows={"torchtitan.csv": 12},
        not_fitted=HOST | {"selective", "odd_head", "odd_width", "hop", "gradient_bytes"},
        spread_factors={
            "products": 2.0
        },  # what 500 W leave of a peak is less sure than what 700 W do
    ),
    Job(
        stack="mlperf-bert",
        rows={MLPERF: 18},
        not_fitted=TENSOR_PARALLEL | CONTEXT | {"odd_head"},
        spread_factors={"sum_shown": 3.0},
    ),
    Job(stack="popart-bert", rows={MLPERF: 4}, only="popart", not_fitted=set()),
    Job(stack="images-pods", rows={MLPERF: 4}, not_fitted=set()),
    Job(stack="images-gpus", rows={MLPERF: 18}, not_fitted=set()),
    Job(stack="streams", rows={"cerebras.csv": 2}, not_fitted=set()),
    Job(
        stack="graphcore-bert",
        rows={"graphcore_performance.csv": 16},
        not_fitted=set(),
        spread_factors={
            "fixed": 1.5
        },  # frameworks differ in what their host does between two steps
    ),
)


def main() -> None:
    """Reads the command line and fits every stack, similar stacks first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--into", type=Path, default=FOLDER / "fitted")
    options = parser.parse_args()
    done: dict[str, Mapping[str, float]] = {}
    for job in JOBS:
        fitted, rows = fit_job(job, options.tables, options.seed, done)
        done[job.stack] = fitted.constants
        law = stack_catalog().stack(job.stack).law
        path = options.into / law / f"{job.stack}.toml"
        _write(path, job, fitted, f"{rows}, seed {options.seed}")
        print(
            f"{job.stack:20} {len(fitted.rows):4} rows, 80 % of log(measured / predicted) within "
            f"+-{fitted.step_spread:.3f} (step time), +-{fitted.memory_spread:.3f} (memory)"
        )


def fit_job(
    job: Job, tables: Path, seed: int, done: Mapping[str, Mapping[str, float]]
) -> tuple[FittedConstants, str]:
    """The fitted constants of a job, and a text that names its rows.

    Args:
        job: the stack to fit and its rows.
        tables: folder of tables.
        seed: decides which rows are selected.
        done: constants of the stacks that were fitted before.
    """
    runs, rows = _rows(job, tables, seed)
    software = stack_catalog().stack(job.stack)
    start: Mapping[str, float] = prior_constants(job.stack)
    if software.similar_to:
        start = {**done[software.similar_to], **software.fixed_constants}
    fitted = fit_stack(
        job.stack, runs, start, not_fitted=frozenset(job.not_fitted),
        spread_factors=job.spread_factors,
        default_spread_factor=_SIMILAR_SPREAD if software.similar_to else 1.0,
    )  # fmt: skip
    return fitted, rows


def _rows(job: Job, tables: Path, seed: int) -> tuple[list[PublishedRun], str]:
    runs: list[PublishedRun] = []
    selections: list[str] = []
    for name, count in job.rows.items():
        rows = [row for row in read_table(tables / name).rows if _matches(row, job.only)]
        table_runs = [
            run for run in rows_to_runs(rows, stack_catalog()) if isinstance(run, PublishedRun)
        ]
        for stack in job.row_stacks or (job.stack,):
            of_stack = [run for run in table_runs if run.stack == stack]
            measured = [run for run in of_stack if run.step_seconds or run.peak_bytes]
            selected = calibration_runs(measured, count, seed)
            selections.append(f"{len(selected)} of {len(of_stack)} rows of {name}")
            runs += selected
    return runs, " and ".join(dict.fromkeys(selections))


def _matches(row: TableRow, pattern: str) -> bool:
    return bool(re.search(pattern, f"{row.text('source')} {row.text('system')}", re.IGNORECASE))


def _write(path: Path, job: Job, fitted: FittedConstants, fitted_from: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "stack": job.stack,
        "fitted_from": fitted_from,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "version": windlass.__version__,
        "rows": list(fitted.rows),
        "interval": {
            "step": round(fitted.step_spread, 4),
            "memory": round(fitted.memory_spread, 4),
        },
        "constants": {name: float(f"{value:.5g}") for name, value in fitted.constants.items()},
    }
    path.write_text(tomli_w.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
