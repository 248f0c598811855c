"""How much of the accuracy is luck of the split: other calibration rows, judged on the rest.

    python benchmarks/splits.py TABLES [--seeds 10] [--keep]

Fits every stack from as many rows as `calibrate.py` takes, from another start for each seed, and
prints the mean absolute error of step time on the rows that were not taken: median and range.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from calibrate import JOBS, fitted_job
from results import append_row
from windlass.validation.csv_table import read_table
from windlass.validation.metrics import step_errors
from windlass.validation.predict_run import predict_runs
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import StackCalibration


def errors_of(tables: Path, seed: int) -> dict[tuple[str, str], tuple[int, float, float, float]]:
    """(table, stack) -> test rows, their mean error, its 90th percentile and the share inside."""
    done: dict[str, Mapping[str, float]] = {}
    found: dict[tuple[str, str], tuple[int, float, float, float]] = {}
    for job in JOBS:
        fitted, _ = fitted_job(job, tables, seed, done)
        done[job.stack] = fitted.constants
        by = StackCalibration(
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
                and run.key not in by.rows
            ]
            errors = step_errors(predict_runs(test, lambda _, by=by: by))
            if errors:
                found[name, job.stack] = (
                    errors.rows,
                    errors.mean,
                    errors.p90,
                    errors.interval_coverage,
                )
    return found


def main() -> None:
    """Reads the command line, fits for each seed, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    asked = parser.parse_args()
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    ninths: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in range(asked.seeds):
        for place, (rows, mean, ninth, inside) in errors_of(asked.tables, seed).items():
            means[place].append(mean)
            ninths[place].append(ninth)
            if asked.keep:
                append_row(
                    "splits", table=place[0], stack=place[1], seed=seed, test_rows=rows,
                    mean_error=mean, ninth_error=ninth, inside_80=inside,
                )  # fmt: skip
    for (table, stack), found in means.items():
        print(
            f"{table:40} {stack:18} mean {statistics.median(found):6.1%} "
            f"({min(found):.1%} to {max(found):.1%}), p90 "
            f"{statistics.median(ninths[table, stack]):6.1%} ({min(ninths[table, stack]):.1%} to "
            f"{max(ninths[table, stack]):.1%})"
        )


if __name__ == "__main__":
    main()
