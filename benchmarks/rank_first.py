"""How much slower the plan that we rank first is than the fastest published plan of the same job.

    python benchmarks/rank_first.py TABLE.csv ... [--keep]

A job is a model on so many devices of one kind, with the same software, global batch, sequence and
precision; its plans are the rows that differ in nothing else. Of those that are predicted to fit,
the one with the shortest predicted step comes first. Its measured step is compared with the
shortest of the job. `--keep` appends a row for each table to the results.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from results import append_row
from windlass.errors import InputErrors
from windlass.validation.predict_run import RunPrediction
from windlass.validation.table_evaluation import evaluate_table

ALLOWED = 0.03
"""Share by which the first plan may be slower than the fastest published one."""


def jobs_of(predictions: Sequence[RunPrediction]) -> list[list[RunPrediction]]:
    """Timed runs by job, of jobs with several different plans."""
    jobs: dict[tuple[object, ...], list[RunPrediction]] = defaultdict(list)
    for one in predictions:
        run, config = one.run, one.config
        if run.step_seconds:
            batch = config.micro * config.accumulation * config.replicas
            job = (
                *run.group, run.cluster.name, run.shape, batch, config.float8, config.old_software,
            )  # fmt: skip
            jobs[job].append(one)
    return [job for job in jobs.values() if len({one.config for one in job}) > 1]


def losses_of(job: Sequence[RunPrediction]) -> tuple[float, RunPrediction, RunPrediction]:
    """How much slower the plan ranked first was than the fastest, and both."""
    fitting = [one for one in job if one.fits is not False] or job
    first = min(fitting, key=lambda one: one.step_seconds)
    best = min(job, key=_measured)
    return _measured(first) / _measured(best) - 1, first, best


def _measured(one: RunPrediction) -> float:
    return one.run.step_seconds or 0.0


def _misses(losses: Sequence[tuple[float, RunPrediction, RunPrediction]]) -> Iterator[str]:
    """The jobs whose first plan is too slow, the slowest first."""
    for loss, first, best in sorted(losses, key=lambda item: -item[0]):
        if loss > ALLOWED:
            yield (
                f"  {100 * loss:.1f} % slower: {first.run.model} on {first.run.machine}: line "
                f"{first.run.line} ranked first, line {best.run.line} was fastest (predicted "
                f"{100 * (best.step_seconds / first.step_seconds - 1):+.1f} %)"
            )


def main() -> None:
    """Reads the command line, ranks each job, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    options = parser.parse_args()
    jobs = good = 0
    for path in options.tables:
        try:
            table = evaluate_table(path)
        except InputErrors:  # no row can be predicted
            continue
        losses = [losses_of(job) for job in jobs_of(table.predictions)]
        near = sum(loss <= ALLOWED for loss, *_ in losses)
        jobs, good = jobs + len(losses), good + near
        if not losses:
            continue
        print(
            f"{table.name}: {near} of {len(losses)} jobs within {100 * ALLOWED:.0f} %", flush=True
        )
        for miss in _misses(losses):
            print(miss)
        if options.keep:
            worst = max(loss for loss, *_ in losses)
            append_row(
                "rank_first", table=table.name, jobs=len(losses), within_3_percent=near,
                worst=round(worst, 4),
            )  # fmt: skip
    print(f"all: {good} of {jobs} jobs")


if __name__ == "__main__":
    main()
