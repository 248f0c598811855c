"""How far predictions are from sources that no constant has seen.

    python benchmarks/left_out.py TABLES

For each cluster the constants of its job are fitted again without any of its rows (`calibrate.py`);
its own constants stay at their priors, and so do those of a stack of which no other cluster is
known. Beside it stands one constant fitted to all other sources, `time = k FLOP / devices`. Writes
`results/left_out.csv`; takes four minutes on one core.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibrate import Constants, fit_steps, predict
from fitting.jobs import JOBS, Job
from results import append_row
from windlass.validation.csv_table import UnusableRow, read_table
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs


def main() -> None:
    """Reads the command line, prints a line for each source and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    folder = parser.parse_args().tables
    runs = {cluster: _runs(folder, job, cluster) for job in JOBS for cluster in job.clusters}
    for job in JOBS:
        for cluster in job.clusters:
            timed = runs[cluster]
            others = [run for name in job.clusters if name != cluster for run in runs[name]]
            constants = _constants(job, cluster, others)
            errors = _errors(timed, constants)
            elsewhere = [run for name, each in runs.items() if name != cluster for run in each]
            constant = _constant_errors(timed, elsewhere)
            row = {
                "left_out": cluster,
                "rows": len(errors),
                "mean_error": round(float(np.abs(errors).mean()), 4),
                "bias": round(float(errors.mean()), 4),
                "constant_of_other_sources": round(float(np.abs(constant).mean()), 4),
            }
            print(row, flush=True)
            append_row("left_out", **row)


def _runs(folder: Path, job: Job, cluster: str) -> list[PublishedRun]:
    """All timed runs of a cluster, without a fitted constant of its own."""
    tables = sorted(table for table, clusters in job.rows.items() if cluster in clusters)
    runs = [run for table in tables for run in rows_to_runs(read_table(folder / table).rows)]
    return [
        run
        for run in runs
        if isinstance(run, PublishedRun) and run.step_seconds and run.cluster.name == cluster
    ]


def _constants(job: Job, cluster: str, others: Sequence[PublishedRun]) -> Constants:
    """Constants without the cluster's rows: fitted to the job's others, else their priors."""
    start = {key: prior.value for key, prior in job.priors.items()}
    if not others:
        return start
    some = others[:: max(1, len(others) // 60)]
    fitted = {key: prior for key, prior in job.priors.items() if key[1] != cluster}
    return {**start, **fit_steps(some, fitted)[0]}


def _errors(runs: Sequence[PublishedRun], constants: Constants) -> np.ndarray:
    errors = []
    for run in runs:
        try:
            errors.append(predict(run, constants).step_seconds / (run.step_seconds or 1.0) - 1.0)
        except UnusableRow:
            continue
    return np.array(errors)


def _constant_errors(runs: Sequence[PublishedRun], others: Sequence[PublishedRun]) -> np.ndarray:
    """Errors of `time = k FLOP / (devices x peak)`, k the median over other sources."""
    k = np.median([(run.step_seconds or 0.0) / _least_seconds(run) for run in others])
    return np.array([k * _least_seconds(run) / (run.step_seconds or 1.0) - 1.0 for run in runs])


def _least_seconds(run: PublishedRun) -> float:
    """Seconds of the model's FLOP at the peak of all devices."""
    config, cluster = run.config, replace(run).cluster
    machine = cluster.machine(run.family, round(config.devices), run.per_host)
    sequences = config.micro * config.accumulation * config.replicas
    flop = sequences * run.shape.sequence * run.shape.flop_per_token
    return float(flop / (config.devices * machine.device.rate("bfloat16").peak))


if __name__ == "__main__":
    main()
