"""The rank correlation that a perfect prediction could reach, given the noise between repeats.

    python benchmarks/rank_ceiling.py TABLE.csv ... [--keep]

Takes the measured step times as the truth and draws for each run another time that the same plan
might have taken, `t exp(N(0, s))`. The rank correlation of both is what an oracle that knows each
plan's true time would reach; it is printed beside that of our own predictions. `s` is the noise
between repeats of one plan in the table; if it has no repeats, several usual values are used.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from results import append_row
from windlass.validation.metrics import MIN_GROUP_ROWS, rank_accuracy, repeat_noise, spearman
from windlass.validation.predict_run import RunPrediction
from windlass.validation.table_evaluation import evaluate_table

DRAWS = 400
USUAL = (0.005, 0.01, 0.02, 0.03)
"""Noise between repeats, from exclusive clusters to shared ones."""


def groups_of(predictions: Sequence[RunPrediction]) -> list[list[RunPrediction]]:
    """Timed runs by model and machine, in groups large enough to be ranked."""
    groups: dict[tuple[str, str], list[RunPrediction]] = defaultdict(list)
    for one in predictions:
        if one.run.step_seconds:
            groups[one.run.group].append(one)
    return [group for group in groups.values() if len(group) >= MIN_GROUP_ROWS]


def noise_of_repeats(groups: Sequence[Sequence[RunPrediction]]) -> float:
    """Standard deviation of log(step time) between repeats, before or after software updates."""
    runs = [one.run for group in groups for one in group]
    return repeat_noise(
        [replace(run, config=replace(run.config, old_software=False)) for run in runs]
    )


def ceiling(groups: Sequence[Sequence[RunPrediction]], spread: float, seed: int) -> float:
    """Median over draws of the mean rank correlation between redrawn and measured times."""
    random = np.random.default_rng(seed)
    rows = [len(group) for group in groups]
    means = []
    for _ in range(DRAWS):
        correlations = []
        for group in groups:
            times = np.array(
                [
                    (one.run.step_seconds or 0.0)
                    / (one.config.micro * one.config.accumulation * one.config.replicas)
                    for one in group
                ]
            )
            correlations.append(
                spearman(times, times * np.exp(random.normal(0.0, spread, len(times))))
            )
        means.append(np.average(correlations, weights=rows))
    return float(np.median(means))


def main() -> None:
    """Reads the command line, draws, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    options = parser.parse_args()
    for table in options.tables:
        predictions = evaluate_table(table).predictions
        groups, ours = groups_of(predictions), rank_accuracy(predictions)
        if ours is None:
            print(f"{table.name}: no group of {MIN_GROUP_ROWS} runs")
            continue
        measured_noise = noise_of_repeats(groups)
        for spread in (measured_noise,) if measured_noise else USUAL:
            best = ceiling(groups, spread, options.seed)
            source = "of its repeats" if measured_noise else "assumed"
            print(
                f"{table.name:40} {ours.rows:4} runs, noise {spread:.1%} ({source}): an oracle "
                f"{best:.3f}, ours {ours.spearman:.3f}"
            )
            if options.keep:
                append_row(
                    "rank_ceiling", table=table.name, rows=ours.rows, noise=spread,
                    from_repeats=bool(measured_noise), oracle=best, ours=ours.spearman,
                    seed=options.seed,
                )  # fmt: skip


if __name__ == "__main__":
    main()
