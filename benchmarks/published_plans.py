"""How well the planner's own clock predicts published runs: plans of theirs, on catalogue machines.

    python benchmarks/published_plans.py TABLE.csv ... [--on dgx-a100-80gb] [--every 2]

Writes each run that our programs can express (GPT blocks, full recompute or none, no ZeRO-3) as a
plan of ours and lays the predicted step beside the measured one; `--keep` appends the rows. Other
software computes the same model in other operations: what its attention writes and reads, ours does
not, so small models are predicted too fast.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import windlass
from results import append_row
from windlass.errors import WindlassError
from windlass.published.express import express
from windlass.published.run import Run
from windlass.published.stacks import catalogue
from windlass.published.table import read_table


def words(run: Run) -> tuple[str, ...]:
    """The request that asks for this run's plan."""
    shape, cut = run.shape, run.cut
    woven = (
        ("order=interleaved", f"interleave={cut.interleave:.0f}")
        if cut.interleave > 1
        else ("order=1f1b",)
    )
    return (
        f"model.layers={shape.layers:.0f}", f"model.width={shape.width:.0f}",
        f"model.heads={shape.heads:.0f}", f"model.vocabulary={shape.vocabulary:.0f}",
        f"cut.tensor={cut.tensor:.0f}", f"cut.pipeline={cut.pipeline:.0f}",
        f"cut.replicas={cut.replicas:.0f}", f"batch.micro={cut.micro:.0f}",
        f"train.batch={cut.micro * cut.accumulation * cut.replicas:.0f}",
        f"train.sequence={shape.sequence:.0f}", "compile=false",
        f"recompute={'layer' if cut.again else 'none'}", *woven,
    )  # fmt: skip


def runs_of(tables: Iterable[Path], every: int) -> list[Run]:
    """Each `every`-th run of the tables that a plan of ours can be."""
    found = [run for path in tables for run in express(read_table(path).rows, catalogue())]
    plain = [run for run in found if isinstance(run, Run) and run.step_seconds and _plain(run)]
    return plain[::every]


def _plain(run: Run) -> bool:
    """Whether a plan of ours says the same: chunks of several blocks, so that ends weigh little."""
    cut = run.cut
    chunks = cut.pipeline * cut.interleave
    ours = cut.zero < 2 and not cut.attention_again and not run.choices
    return ours and run.shape.layers % chunks == 0 and run.shape.layers >= 2 * chunks


def main() -> None:
    """Reads the command line, predicts, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--on", default="dgx-a100-80gb")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    asked = parser.parse_args()
    misses = []
    for run in runs_of(asked.tables, asked.every):
        hosts = max(1, round(run.cut.devices / 8))
        try:
            planned = windlass.plan("gpt3-13b", *words(run), machine=f"{asked.on}:{hosts}")
        except WindlassError as error:
            print(f"{run.model:12} not planned: {str(error).splitlines()[0]}")
            continue
        predicted, measured = planned.prediction.step_seconds, run.step_seconds or 0.0
        misses.append(np.log(predicted / measured))
        cut = f"t{run.cut.tensor:.0f} p{run.cut.pipeline:.0f} r{run.cut.replicas:.0f}"
        print(
            f"{run.model:12} {cut:14} micro {run.cut.micro:<3.0f} predicted {predicted:8.3f} s, "
            f"measured {measured:8.3f} s, {predicted / measured - 1:+.1%}",
            flush=True,
        )
        if asked.keep:
            append_row(
                "published_plans", on=asked.on, model=run.model, cut=cut, micro=run.cut.micro,
                predicted_seconds=predicted, measured_seconds=measured,
            )  # fmt: skip
    errors = np.abs(np.expm1(misses))
    within = np.quantile(np.abs(misses), 0.8)
    print(
        f"{len(misses)} runs: mean {errors.mean():.1%}, median {np.median(errors):.1%}, bias "
        f"{np.expm1(misses).mean():+.1%}; 80 % within a factor of {np.exp(within):.3f}"
    )


if __name__ == "__main__":
    main()
