"""Is a sparse model as good as a dense one? Recipe `sparse-then-dense`, three seeds of each arm.

    python benchmarks/parity.py FOLDER [--scale tiny] [--seeds 3]

Runs the recipe in a folder, or goes on there, and appends a row for each arm at equal tokens, FLOP
and wall time. The page is `FOLDER/recipe.html`.
"""

import argparse

import windlass
from results import append_row


def main() -> None:
    """Runs the recipe, prints what it found, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    result = windlass.run_recipe(
        "sparse-then-dense", folder=words.folder, scale=words.scale, seeds=words.seeds
    )
    report = result.report
    for comparison in report.comparisons:
        for arm, facts in zip(report.arms, report.facts, strict=True):
            band = comparison.bands[arm.name]
            scores = {
                f"{one.task}_{one.shots}_shot{suffix}": round(value, 4)
                for one in report.scores
                if one.arm == arm.name and one.budget == comparison.budget
                for suffix, value in (("", one.accuracy), ("_error", one.error))
            }
            append_row(
                "parity", scale=words.scale, seeds=comparison.seeds, equal=comparison.budget,
                amount=round(comparison.amount), arm=arm.name, weights=facts.parameters,
                loss_low=band and round(band.low, 4), loss=band and round(band.middle, 4),
                loss_high=band and round(band.high, 4),
                run_seconds=round(arm.total("seconds").middle, 2),
                run_predicted_seconds=round(facts.predicted_seconds, 2), **scores,
            )  # fmt: skip
    print("\n".join((*report.sentences, str(result.page))))


if __name__ == "__main__":
    main()
