"""Buys a noise floor: runs one plan a few times with other seeds, and says how much they differ."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from rich import box
from rich.console import RenderableType
from rich.table import Table

from windlass.answer import Answer
from windlass.errors import RequestError
from windlass.flags import RunsFolder, Watch
from windlass.jobs import SEARCHED_PLAN, Model, Planned, PlanOptions, Progress, build_plan
from windlass.judge import robust_deviation
from windlass.record import RUNS
from windlass.schema import Step
from windlass.training import Run, train
from windlass.units import format_seconds

_FEWEST_SEEDS = 3
_LAST = 20
"""The loss of a run is the median over so many last steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Answer):
    """How much runs of one plan differ that differ in their seeds only."""

    group: str
    """The group of the runs in the record."""
    folders: tuple[Path, ...]
    seconds: float
    """Median step time."""
    deviation: float
    """Standard deviation of the logarithm of the step time between runs."""
    kinds: dict[str, float]
    """The same of the seconds of each kind of instruction."""
    loss: float
    """The same of the loss at the last step."""
    steps: int
    """Steps of each run."""

    def lines(self) -> Iterator[RenderableType]:
        """How far runs are apart, and where they are."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("between runs", "noise floor"):
            table.add_column(title)
        rows = {"step time": self.deviation, "loss": self.loss, **self.kinds}
        for name, deviation in rows.items():
            table.add_row(name, f"{deviation:.1%}")
        yield table
        yield (
            f"{len(self.folders)} runs of {self.steps} steps of {format_seconds(self.seconds)}, "
            f"group `{self.group}` in the record"
        )


def noise(
    model: Model = None,
    /,
    *overrides: str,
    seeds: int = 5,
    steps: int = 100,
    options: PlanOptions = SEARCHED_PLAN,
    root: RunsFolder = RUNS,
    progress: Watch = None,
) -> Noise:
    """Run a plan with several seeds, and say how much the runs differ: the noise floor.

    The runs are kept as a group in the record, and `judge` compares later runs with them. Each
    stops after `steps` steps of the requested number, so that its learning rates are those of the
    whole run. For example: `windlass noise gpt-tiny --plan plan.toml --seeds 5`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.steps=500` or `model.layers=8`; `windlass keys`
            lists all.
        seeds: Number of runs, at least 3; their seeds follow that of the request.
        steps: Steps of each run, of the requested number.
        options: Device memory budget, request file, and a plan file in place of a search.
        root: The folder that holds the run folders.
        progress: Called with how far the runs are.

    Raises:
        RequestError: fewer than 3 seeds.
        WindlassError: a run failed.
    """
    if seeds < 1 or steps < 1:
        raise RequestError(f"`--seeds {seeds} --steps {steps}`: both should be above 0")
    planned = build_plan(model, overrides, options, progress=progress)
    if seeds < _FEWEST_SEEDS:
        raise RequestError(f"{seeds} seeds say nothing of noise; take {_FEWEST_SEEDS} or more")
    steps = min(steps, planned.request.train.steps)
    group = f"noise-{planned.plan.label}"
    runs = []
    for index in range(seeds):
        seed = planned.request.train.seed + 1 + index
        run = train(_with_seed(planned, seed), root=root, group=group)
        runs.append((run.folder, tuple(_first_steps(run, steps, index, seeds, progress))))
    measured = [steps_of_run for _, steps_of_run in runs]
    kinds = sorted({kind for steps_of_run in measured for kind in steps_of_run[-1].by_kind})
    return Noise(
        group=group,
        folders=tuple(folder for folder, _ in runs),
        seconds=float(np.median([_median(run, "seconds") for run in measured])),
        deviation=_deviation([_median(run, "seconds") for run in measured]),
        kinds={kind: _deviation([_median(run, kind) for run in measured]) for kind in kinds},
        loss=_deviation([float(np.median([s.loss for s in run[-_LAST:]])) for run in measured]),
        steps=steps,
    )


def _with_seed(planned: Planned, seed: int) -> Planned:
    settings = planned.request.train.model_copy(update={"seed": seed})
    return replace(planned, request=planned.request.model_copy(update={"train": settings}))


def _first_steps(
    run: Run, count: int, index: int, seeds: int, progress: Progress | None
) -> Iterator[Step]:
    steps = iter(run)
    with closing(steps):  # type: ignore[type-var]  # it is a generator
        for step in islice(steps, count):
            if progress is not None:
                progress("measuring noise", index * count + step.step, seeds * count)
            yield step


def _median(steps: Sequence[Step], name: str) -> float:
    values = [s.seconds if name == "seconds" else s.by_kind.get(name, 0.0) for s in steps]
    return float(np.median(values))


def _deviation(values: Sequence[float]) -> float:
    """Robust standard deviation of logarithms; NaN if a value is not positive."""
    if min(values) <= 0:
        return math.nan
    return robust_deviation(np.log(values))[0]
