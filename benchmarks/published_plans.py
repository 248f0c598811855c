"""How well the planner's own clock predicts published runs: plans of theirs, on machines of theirs.

    python benchmarks/published_plans.py TABLE.csv ... [--on dgx-a100-80gb] [--every 2]

Writes each run that our programs can express (GPT blocks, full recompute or none, no ZeRO-3) as a
plan of ours, on a machine of the catalogue with as many network cards a host as its cluster has,
and lays the predicted step beside the measured one; `--keep` appends the rows. `--first` begins
later: `--every 6 --first 0` to `5` are all runs in six pieces.

Other software computes the same model in other operations: its attention writes scores and reads
them again, ours does not. So beside it stands what the law of published runs says of the same run
were its attention like ours; `law` is what it says of the run as it was.
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

OURS = "mosaic-a100-80gb"
"""A stack whose attention writes no scores, as ours does not."""
ATTENTION = ("gpu.attention", "gpu.scored", "gpu.attention_back", "gpu.score_bytes")
LARGE = 20e9
"""Parameters that models of 22B and larger have at least."""


def words(run: PublishedRun) -> tuple[str, ...]:
    """The request that asks for this run's plan."""
    shape, cut = run.shape, run.config
    woven = (
        ("parallel.schedule=interleaved", f"parallel.virtual_stages={cut.virtual_stages:.0f}")
        if cut.virtual_stages > 1
        else ("parallel.schedule=1f1b",)
    )
    return (
        f"model.layers={shape.layers:.0f}", f"model.width={shape.width:.0f}",
        f"model.heads={shape.heads:.0f}", f"model.vocabulary={shape.vocabulary:.0f}",
        f"parallel.tensor={cut.tensor:.0f}", f"parallel.pipeline={cut.pipeline:.0f}",
        f"parallel.data={cut.replicas:.0f}", f"batch.micro={cut.micro:.0f}",
        f"train.batch={cut.micro * cut.accumulation * cut.replicas:.0f}",
        f"train.sequence={shape.sequence:.0f}", "compile=false",
        f"recompute={'layer' if cut.recompute_share else 'none'}", *woven,
    )  # fmt: skip


def runs_of(tables: Iterable[Path], every: int, first: int) -> list[PublishedRun]:
    """Each `every`-th run of the tables that a plan of ours can be, from the `first` on."""
    found = [run for path in tables for run in rows_to_runs(read_table(path).rows, stack_catalog())]
    plain = [
        run for run in found if isinstance(run, PublishedRun) and run.step_seconds and _plain(run)
    ]
    return plain[first::every]


def cluster_of(run: PublishedRun, on: str) -> Machine:
    """A machine of the catalogue as large as the run's, with the network cards of its hosts."""
    known = stack_catalog()
    device = known.stack(run.stack).device_in_cluster(known.device(run.device), run.per_host)
    machine = load_machine(f"{on}:{max(1, round(run.config.devices / device.per_host))}")
    if machine.hosts == 1:
        return machine
    *inner, outer = machine.links
    share = calibration(run.stack).values["gpu.cards"]
    cards = {
        "rate": share * device.network_rate / device.network_cards,
        "shared_by": round(device.per_host / device.network_cards),
    }
    return machine.model_copy(update={"links": (*inner, outer.model_copy(update=cards))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Seconds of a step of one run, all but `measured` predicted."""

    run: PublishedRun
    clock: float
    law: float
    like_ours: float
    """By the law, were its attention like ours."""
    measured: float


def told(run: PublishedRun, on: str) -> Told:
    """What clock and law say of a run.

    Raises:
        WindlassError: our programs cannot run this plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        cluster_of(run, on).save(path)
        planned = windlass.plan("gpt3-13b", *words(run), machine=str(path))
    return Told(
        run=run,
        clock=planned.prediction.step_seconds,
        law=_law(run, {}),
        like_ours=_law(run, {name: calibration(OURS).values[name] for name in ATTENTION}),
        measured=run.step_seconds or 0.0,
    )


def _law(run: PublishedRun, changed: Mapping[str, float]) -> float:
    known = calibration(run.stack)
    constants = replace(known, values={**known.values, **changed})
    return predict_runs([run], lambda _: constants)[0].step_seconds


def _plain(run: PublishedRun) -> bool:
    """Whether a plan of ours says the same: chunks of several blocks, so that ends weigh little."""
    cut = run.config
    chunks = cut.pipeline * cut.virtual_stages
    ours = cut.zero < 2 and not cut.selective_recompute and not run.candidates
    return ours and run.shape.layers % chunks == 0 and run.shape.layers >= 2 * chunks


def main() -> None:
    """Reads the command line, predicts, prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--on", default="dgx-a100-80gb")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="run to begin with")
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    asked = parser.parse_args()
    found: list[Told] = []
    for run in runs_of(asked.tables, asked.every, asked.first):
        try:
            found.append(told(run, asked.on))
        except WindlassError as error:
            print(f"{run.model:12} not planned: {str(error).splitlines()[0]}")
            continue
        print(_line(found[-1]), flush=True)
        if asked.keep:
            _keep(found[-1], asked.on)
    large = [one for one in found if one.run.shape.parameters >= LARGE]
    for name, some in (("all", found), ("22B and larger", large)):
        for against in ("measured", "like_ours"):
            print(f"{name}, clock over {against}: {_summary(some, against)}")


def _cut(run: PublishedRun) -> str:
    return f"t{run.config.tensor:.0f} p{run.config.pipeline:.0f} r{run.config.replicas:.0f}"


def _line(one: Told) -> str:
    run = one.run
    return (
        f"{run.model:12} {_cut(run):14} micro {run.config.micro:<3.0f} "
        f"predicted {one.clock:8.3f} s, measured {one.measured:8.3f} s, "
        f"{one.clock / one.measured - 1:+.1%}; law {one.law / one.measured - 1:+.1%}, "
        f"clock over the law with attention like ours {one.clock / one.like_ours - 1:+.1%}"
    )


def _keep(one: Told, on: str) -> None:
    append_row(
        "published_plans", on=on, model=one.run.model, cut=_cut(one.run), micro=one.run.config.micro,
        predicted_seconds=round(one.clock, 4), measured_seconds=one.measured,
        law_seconds=round(one.law, 4), like_ours_seconds=round(one.like_ours, 4),
    )  # fmt: skip


def _summary(some: Sequence[Told], against: str) -> str:
    misses = np.array([np.log(one.clock / getattr(one, against)) for one in some])
    errors = np.abs(np.expm1(misses))
    within = np.quantile(np.abs(misses), 0.8)
    return (
        f"{len(some)} runs, mean {errors.mean():.1%}, median {np.median(errors):.1%}, bias "
        f"{np.expm1(misses).mean():+.1%}; 80 % within a factor of {np.exp(within):.3f}"
    )


if __name__ == "__main__":
    main()
