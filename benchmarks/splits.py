"""How much the accuracy depends on the split: other calibration rows, tested on the rest.

    python benchmarks/splits.py TABLES [--seeds 10] [--keep]

Fits every stack to as many rows as `calibrate.py` selects, different ones for each seed, and prints
the mean absolute error of step time on the other rows: median and range over seeds.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from calibrate import JOBS, fit_job
from results import append_row
from windlass.validation.csv_table import read_table
from windlass.validation.metrics import step_errors
from windlass.validation.predict_run import predict_runs
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import StackCalibration


def errors_of(tables: Path, seed: int) -> dict[tuple[str, str], tuple[int, float, float, float]]:
    """(table, stack) -> number of test rows, mean and 90th percentile of their error, coverage."""
    done: dict[str, Mapping[str, float]] = {}
    results: dict[tuple[str, str], tuple[int, float, float, float]] = {}
    for job in JOBS:
        fitted, _ = fit_job(job, tables, seed, done)
        done[job.stack] = fitted.constants
        constants = StackCalibration(
            stack=job.stack, values=fitted.constants, provenance="fitted", fitted_from="",
            rows=frozenset(fitted.rows), step_spread=fitted.step_spread,
            memory_spread=fitted.memory_spread,
        )  # fmt: skip
        for name in job.rows:
            rows = rows_to_runs(read_table(tables / name).rows, stack_catalog())
            test = [
                run
                for run in rows
                if isinstance(run, PublishedRun)
                and run.stack == job.stack
                and run.key not in constants.rows
            ]
            errors = step_errors(predict_runs(test, lambda _, constants=constants: constants))
            if errors:
                results[name, job.stack] = (
                    errors.rows,
                    errors.mean,
                    errors.p90,
                    errors.interval_coverage,
                )
    return results


def main() -> None:
    """Reads the command line, fits for each seed, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    options = parser.parse_args()
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    p90s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in range(options.seeds):
        for (table, stack), (rows, mean, p90, inside) in errors_of(options.tables, seed).items():
            means[table, stack].append(mean)
            p90s[table, stack].append(p90)
            if options.keep:
                append_row(
                    "splits", table=table, stack=stack, seed=seed, test_rows=rows,
                    mean_error=mean, ninth_error=p90, inside_80=inside,
                )  # fmt: skip
    for (table, stack), errors in means.items():
        print(
            f"{table:40} {stack:18} mean {statistics.median(errors):6.1%} "
            f"({min(errors):.1%} to {max(errors):.1%}), p90 "
            f"{statistics.median(p90s[table, stack]):6.1%} ({min(p90s[table, stack]):.1%} to "
            f"{max(p90s[table, stack]):.1%})"
        )


if __name__ == "__main__":
    main()
