"""What rank correlation could a perfect prediction reach, given what repeats of a plan differ by?

    python benchmarks/rank_ceiling.py TABLE.csv ... [--keep]

Takes measured step times for the truth and draws for each run another time that the same plan might
have taken, `t exp(N(0, s))`: what an oracle that knows each plan's true time would be given, and
prints its rank correlation with what was measured beside that of our own predictions. `s` is what
repeats of one plan differ by within the table; where it has none, a row of usual values.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from results import append_row
from windlass.validation.evaluate_table import evaluate_table
from windlass.validation.metrics import MIN_GROUP_ROWS, rank_accuracy, repeat_noise, spearman
from windlass.validation.predict_run import RunPrediction

DRAWS = 400
USUAL = (0.005, 0.01, 0.02, 0.03)
"""Of repeats on clusters that nobody else uses at the time, to those that are shared."""


def groups_of(found: Sequence[RunPrediction]) -> list[list[RunPrediction]]:
    """Timed runs by model and machine, where there are enough of them to be ranked."""
    groups: dict[tuple[str, str], list[RunPrediction]] = defaultdict(list)
    for one in found:
        if one.run.step_seconds:
            groups[one.run.group].append(one)
    return [group for group in groups.values() if len(group) >= MIN_GROUP_ROWS]


def repeats(groups: Sequence[Sequence[RunPrediction]]) -> float:
    """Standard deviation of log(step time) between repeats, whenever they ran; 0 without any."""
    runs = [one.run for group in groups for one in group]
    return repeat_noise(
        [replace(run, config=replace(run.config, old_software=0.0)) for run in runs]
    )


def ceiling(groups: Sequence[Sequence[RunPrediction]], spread: float, seed: int) -> float:
    """Median over draws of the mean rank correlation of times drawn anew with those measured."""
    random = np.random.default_rng(seed)
    rows = [len(group) for group in groups]
    found = []
    for _ in range(DRAWS):
        each = []
        for group in groups:
            times = np.array(
                [
                    (one.run.step_seconds or 0.0)
                    / (one.config.micro * one.config.accumulation * one.config.replicas)
                    for one in group
                ]
            )
            each.append(spearman(times, times * np.exp(random.normal(0.0, spread, len(times)))))
        found.append(np.average(each, weights=rows))
    return float(np.median(found))


def main() -> None:
    """Reads the command line, draws, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    asked = parser.parse_args()
    for table in asked.tables:
        found = evaluate_table(table).predictions
        groups, ours = groups_of(found), rank_accuracy(found)
        if ours is None:
            print(f"{table.name}: no group of {MIN_GROUP_ROWS} runs")
            continue
        known = repeats(groups)
        for spread in (known,) if known else USUAL:
            best = ceiling(groups, spread, asked.seed)
            told = "its repeats'" if known else "taken"
            print(
                f"{table.name:40} {ours.rows:4} runs, noise {spread:.1%} ({told}): an oracle "
                f"{best:.3f}, ours {ours.spearman:.3f}"
            )
            if asked.keep:
                append_row(
                    "rank_ceiling", table=table.name, rows=ours.rows, noise=spread,
                    from_repeats=bool(known), oracle=best, ours=ours.spearman, seed=asked.seed,
                )  # fmt: skip


if __name__ == "__main__":
    main()
