"""A run of a few steps in a process of its own, for experiments that repeat one.

`python -P short_run.py SPEC` trains the request of a file for some steps of its schedule, into a
run folder of its own, and stops there; SPEC is JSON.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from windlass.errors import RunBroken, WindlassError
from windlass.jobs import make_request, plan
from windlass.judge import TestResult
from windlass.tracking import read_series
from windlass.training import train

_SHOWN = 300
"""Last characters of an error that a message shows."""
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """What a short run does."""

    request: Path
    """A request file."""
    plan: Path | None = None
    """A plan file; None plans anew."""
    steps: int
    """Steps after which it stops; the schedules of the request stay as they are."""
    folder: Path
    """The new run folder."""
    group: str
    """The name that the runs of the experiment share."""
    variables: Mapping[str, str | None] | None = None
    """Environment variables that it has; None as a value takes one away."""
    source: Path | None = None
    """The folder with the code of Windlass to run; None is this one."""
    directory: Path | None = None
    """The working directory; None is this one."""


def run_shortly(run: ShortRun) -> None:
    """Takes the steps, and returns when they are on record.

    Raises:
        RunBroken: the process ended with an error.
    """
    environment = dict(os.environ)
    for name, value in (run.variables or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    if run.source is not None:
        environment["PYTHONPATH"] = str(run.source.absolute())
    absolute = {name: Path(value).absolute()
                for name, value in asdict(run).items() if isinstance(value, Path)}  # fmt: skip
    spec = json.dumps(asdict(run) | absolute, default=str)
    process = subprocess.run(  # noqa: S603  the arguments are a list, and no shell reads them
        # By its path, as the code of an older version may have no such module.
        (sys.executable, "-P", __file__, spec),
        capture_output=True, text=True, check=False, env=environment, cwd=run.directory,
    )  # fmt: skip
    if process.returncode:
        raise RunBroken(f"a run of {run.steps} steps failed: {process.stderr.strip()[-_SHOWN:]}")


def metric_value(folder: Path, metric: str, steps: int) -> float:
    """The mean loss of the later half of some steps, or the median seconds of a step.

    NaN where a run has no such number, or a loss that is not finite.

    Args:
        metric: `loss` or `seconds`.
        steps: number of the last step that counts.
    """
    series = read_series(folder).get(metric)
    if series is None:
        return math.nan
    values = series.values[series.steps <= steps]
    if not len(values):
        return math.nan
    if metric == "loss":
        return float(values[len(values) // 2 :].mean())
    warm = values[_WARM_UP_STEPS:] if len(values) > 2 * _WARM_UP_STEPS else values
    return float(np.median(warm))


def nearer_side(value: float, good: float, bad: float) -> TestResult:
    """Bad if a metric lies nearer to the bad run, on a logarithmic scale; NaN is no finite metric.

    A run without a finite metric is bad only if the bad run has none either.
    """
    if math.isnan(value):
        return "bad" if math.isnan(bad) else "unresolved"
    if math.isnan(bad):
        return "good"
    return "bad" if abs(math.log(value / bad)) < abs(math.log(value / good)) else "good"


def _take_steps(request: Path, plan_file: Path | None, folder: Path, group: str, last: int) -> None:
    planned = plan(make_request(None, file=request), plan=plan_file)
    for step in train(planned, folder=folder, group=group):
        if step.step >= last:
            return


def _main(spec: Mapping[str, str | int | None]) -> None:
    plan_file = Path(str(spec["plan"])) if spec["plan"] else None
    _take_steps(
        Path(str(spec["request"])), plan_file, Path(str(spec["folder"])), str(spec["group"]),
        int(spec["steps"] or 0),
    )  # fmt: skip


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except WindlassError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
