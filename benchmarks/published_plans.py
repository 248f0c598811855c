"""Errors of the planner's own simulator and of the fitted laws on the same published runs.

    python benchmarks/published_plans.py TABLE.csv ... [--on dgx-a100-80gb] [--every 2] [--keep]

Each run that our programs can express (GPT blocks, full recompute or none, no ZeRO-3) becomes a
plan on a catalog machine with as many network cards in each host as its cluster has. The output
compares the step time that the planner's simulator predicts for the plan with the measured one,
beside the prediction of the law that was fitted to published runs of that software. `--keep`
appends the rows. `--every 6 --first 0` to `--first 5` are all runs in six parts.

Other software computes the same model with other operations: its attention writes scores and reads
them again, ours does not. A third column therefore compares the simulator with the law of the same
run with our kind of attention.
"""

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import windlass
from results import append_row
from windlass.errors import WindlassError
from windlass.hardware.catalog import load_machine
from windlass.schema.machine import Machine
from windlass.validation.csv_table import read_table
from windlass.validation.predict_run import predict_runs
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import calibration

OWN_ATTENTION_STACK = "mosaic-a100-80gb"
"""A stack whose attention does not write its scores, like ours."""
ATTENTION = ("gpu.attention", "gpu.scored", "gpu.attention_back", "gpu.score_bytes")
LARGE = 20e9
"""Least number of parameters of models of 22B and larger."""


def overrides(run: PublishedRun) -> tuple[str, ...]:
    """The request that pins this run's plan."""
    shape, config = run.shape, run.config
    schedule = (
        ("parallel.schedule=interleaved", f"parallel.virtual_stages={config.virtual_stages:.0f}")
        if config.virtual_stages > 1
        else ("parallel.schedule=1f1b",)
    )
    return (
        f"model.layers={shape.layers:.0f}", f"model.width={shape.width:.0f}",
        f"model.heads={shape.heads:.0f}", f"model.vocabulary={shape.vocabulary:.0f}",
        f"parallel.tensor={config.tensor:.0f}", f"parallel.pipeline={config.pipeline:.0f}",
        f"parallel.data={config.replicas:.0f}", f"batch.micro={config.micro:.0f}",
        f"train.batch={config.micro * config.accumulation * config.replicas:.0f}",
        f"train.sequence={shape.sequence:.0f}", "compile=false",
        f"recompute={'full' if config.recompute_share else 'none'}", *schedule,
    )  # fmt: skip


def expressible_runs(tables: Iterable[Path], every: int, first: int) -> list[PublishedRun]:
    """Each `every`-th run of the tables that our programs can express, from the `first` on."""
    rows = [row for path in tables for row in rows_to_runs(read_table(path).rows, stack_catalog())]
    runs = [
        row
        for row in rows
        if isinstance(row, PublishedRun) and row.step_seconds and _is_expressible(row)
    ]
    return runs[first::every]


def cluster_of(run: PublishedRun, on: str) -> Machine:
    """A catalog machine as large as the run's, with the network cards of its hosts."""
    catalog = stack_catalog()
    device = catalog.stack(run.stack).device_in_cluster(catalog.device(run.device), run.per_host)
    machine = load_machine(f"{on}:{max(1, round(run.config.devices / device.per_host))}")
    if machine.hosts == 1:
        return machine
    *inner, outer = machine.links
    share = calibration(run.stack).values["gpu.cards"]
    network = {
        "rate": share * device.network_rate / device.network_cards,
        "shared_by": round(device.per_host / device.network_cards),
    }
    return machine.model_copy(update={"links": (*inner, outer.model_copy(update=network))})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step of one run; all but `measured` are predictions."""

    run: PublishedRun
    simulator: float
    """By the planner's own simulator, as for any plan."""
    law: float
    """By the law that was fitted to this software."""
    law_own_attention: float
    """By the law with our kind of attention."""
    measured: float


def predict(run: PublishedRun, on: str) -> StepTimes:
    """Predictions of a run by the simulator and by the law.

    Raises:
        WindlassError: our programs cannot run this plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        cluster_of(run, on).save(path)
        planned = windlass.plan("gpt3-13b", *overrides(run), machine=str(path))
    own_attention = calibration(OWN_ATTENTION_STACK).values
    return StepTimes(
        run=run,
        simulator=planned.prediction.step_seconds,
        law=_law_seconds(run, {}),
        law_own_attention=_law_seconds(run, {name: own_attention[name] for name in ATTENTION}),
        measured=run.step_seconds or 0.0,
    )


def _law_seconds(run: PublishedRun, changed: Mapping[str, float]) -> float:
    fitted = calibration(run.stack)
    constants = replace(fitted, values={**fitted.values, **changed})
    return predict_runs([run], lambda _: constants)[0].step_seconds


def _is_expressible(run: PublishedRun) -> bool:
    """Whether a plan of ours computes the same, with at least two layers in each model chunk."""
    config = run.config
    chunks = config.pipeline * config.virtual_stages
    same = config.zero < 2 and not config.selective_recompute and not run.candidates
    return same and run.shape.layers % chunks == 0 and run.shape.layers >= 2 * chunks


def main() -> None:
    """Reads the command line, predicts, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--on", default="dgx-a100-80gb")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first run")
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    options = parser.parse_args()
    predictions: list[StepTimes] = []
    for run in expressible_runs(options.tables, options.every, options.first):
        try:
            predictions.append(predict(run, options.on))
        except WindlassError as error:
            print(f"{run.model:12} not planned: {str(error).splitlines()[0]}")
            continue
        print(_line(predictions[-1]), flush=True)
        if options.keep:
            _keep(predictions[-1], options.on)
    large = [one for one in predictions if one.run.shape.parameters >= LARGE]
    for name, some in (("all runs", predictions), ("models of 22B and larger", large)):
        if some:
            print(f"{name}:")
            print(f"  planner's simulator over measured: {_errors(some, 'simulator', 'measured')}")
            print(f"  fitted law over measured:          {_errors(some, 'law', 'measured')}")
            print(
                "  simulator over law, own attention: "
                f"{_errors(some, 'simulator', 'law_own_attention')}"
            )


def _degrees(run: PublishedRun) -> str:
    return f"t{run.config.tensor:.0f} p{run.config.pipeline:.0f} r{run.config.replicas:.0f}"


def _line(one: StepTimes) -> str:
    run = one.run
    return (
        f"{run.model:12} {_degrees(run):14} micro {run.config.micro:<3.0f} "
        f"measured {one.measured:8.3f} s, simulator {one.simulator:8.3f} s "
        f"({one.simulator / one.measured - 1:+.1%}), law {one.law:8.3f} s "
        f"({one.law / one.measured - 1:+.1%}); simulator over the law with own attention "
        f"{one.simulator / one.law_own_attention - 1:+.1%}"
    )


def _keep(one: StepTimes, on: str) -> None:
    append_row(
        "published_plans", on=on, model=one.run.model, cut=_degrees(one.run),
        micro=one.run.config.micro, predicted_seconds=round(one.simulator, 4),
        measured_seconds=one.measured, law_seconds=round(one.law, 4),
        like_ours_seconds=round(one.law_own_attention, 4),
    )  # fmt: skip


def _errors(some: Sequence[StepTimes], predicted: str, reference: str) -> str:
    """Mean and median absolute error, bias and the factor that holds for 80 % of the runs."""
    logs = np.array([np.log(getattr(one, predicted) / getattr(one, reference)) for one in some])
    errors = np.abs(np.expm1(logs))
    factor = np.exp(np.quantile(np.abs(logs), 0.8))
    return (
        f"{len(some)} runs, mean {errors.mean():.1%}, median {np.median(errors):.1%}, bias "
        f"{np.expm1(logs).mean():+.1%}; 80 % within a factor of {factor:.3f}"
    )


if __name__ == "__main__":
    main()
