"""`bisect`: which difference between a good and a bad run makes it bad, by short runs of mixtures.

A mixture has the inputs of the good run but for some, which it has of the bad one. Both records
answer for themselves where the metric is the loss, which the same inputs give again.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tomli_w

from windlass.atomic_files import atomic_write
from windlass.errors import RecordError, RequestError, RunBroken
from windlass.jobs import RUNS, Progress, load
from windlass.judge import (
    NoisePrior,
    TestResult,
    find_culprits,
    noise_floor,
)
from windlass.judging.differences.code_versions import (
    CodeVersion,
    code_versions,
    find_first_bad_commit,
    require_code_of_this_host,
)
from windlass.judging.differences.factors import (
    Factor,
    describe_untested,
    find_factors,
    mixed_request,
    mixed_variables,
)
from windlass.judging.differences.short_run import ShortRun, metric_value, nearer_side, run_shortly
from windlass.schema import PLAN_FILE
from windlass.tracking import RunRecord, read_series

Metric = Literal["loss", "seconds"]
_TIMED_STEPS = 30
_FEWEST_STEPS, _MORE_STEPS = 20, 10
_CLEAR_CHANGE = 0.02
"""A loss has changed where it differs by 2 % from then on."""
_CLEAR_STEPS = 5
_SEEDS = 2
"""Runs of the good inputs with other seeds, which tell the noise of a loss."""
_SIGMAS, _CLEAR_SIGMAS = 3.0, 8.0
"""Fewer deviations apart are noise; below the second number all steps of both records are taken."""
_MOST_REPEATS = 2
"""Further runs, with other seeds, of a mixture that lies between both sides."""
_BETWEEN = 0.25
"""Share of the way between both sides, around its middle, in which a value decides nothing."""
_PRIORS: Mapping[Metric, NoisePrior] = {
    "loss": NoisePrior(0.005, 2.0),
    "seconds": NoisePrior(0.02, 4.0),
}
"""What runs that are alike differ by, on a logarithmic scale, before any of them is seen."""
_HASH_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectTest:
    """One mixture that was tried."""

    changes: tuple[str, ...]
    """What it has of the bad run."""
    value: float
    """The metric; NaN if the run failed."""
    result: TestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Which differences make a run bad."""

    metric: Metric
    steps: int
    """Steps of each short run."""
    factors: tuple[str, ...]
    """What was tried: keys of the request, `plan`, `code`, or `variable NAME`."""
    culprits: tuple[str, ...]
    """All of them are needed; empty if nothing differs beyond noise."""
    tests: tuple[BisectTest, ...]
    reruns: int
    """Short runs that were made."""
    verdict: str
    """One sentence with its numbers."""
    untested: tuple[str, ...]
    """Differences that no run here can have, a sentence each."""


def bisect(
    good: str | Path,
    bad: str | Path,
    *,
    metric: str | None = None,
    steps: int | None = None,
    most_tests: int = 8,
    run_recorded_code: bool = False,
    root: Path | str = RUNS,
    progress: Progress | None = None,
) -> Bisection:
    """Finds which differences between two runs make the second one bad.

    Its short runs stay in the record, as a group, and are not repeated when it is asked again.

    Args:
        good: a run: folder, name, the first characters of its id, or `last`.
        bad: a run that turned out otherwise.
        metric: `loss` or `seconds`; None takes the loss if that differs, and else the seconds.
        steps: steps of each short run; None takes as few as tell both runs apart.
        most_tests: mixtures that are tried at most.
        run_recorded_code: whether the model, code and settings of runs that were not made by this
            user on this machine may be run here; `recorded_code` shows them.
        root: the folder that holds the run folders.
        progress: called with how many short runs have ended.

    Raises:
        RecordError: a run is missing or has no steps, both are one, or one was made elsewhere.
        RequestError: the metric is unknown.
    """
    records = load(good, root=root), load(bad, root=root)
    _require_comparable(*records, metric)
    if not run_recorded_code:
        require_code_of_this_host(*records)
    chosen: Metric = "loss" if metric == "loss" else "seconds" if metric else _metric(*records)
    most = min(record.steps[-1].step for record in records)
    count = steps or _steps_that_tell(*records, chosen)
    experiment = _Experiment(*records, chosen, count, Path(root), progress)
    if steps is None and count < most and experiment.sigmas < _CLEAR_SIGMAS:
        experiment = _Experiment(*records, chosen, most, Path(root), progress, experiment.reruns)
    return experiment.bisect(most_tests)


class _Experiment:
    """The mixtures of two runs, each of which is run once."""

    def __init__(
        self,
        good: RunRecord,
        bad: RunRecord,
        metric: Metric,
        steps: int,
        root: Path,
        progress: Progress | None,
        reruns: int = 0,
    ) -> None:
        self._good, self._bad, self._metric, self._steps = good, bad, metric, steps
        self._root, self._progress = root, progress
        self.reruns = reruns
        self._group = f"bisect {good.id[-6:]} {bad.id[-6:]}"
        self._code: tuple[CodeVersion, CodeVersion] | None
        self._code, code_problem = code_versions(good.folder, bad.folder)
        self._factors = tuple(find_factors(good, bad, with_code=self._code is not None))
        self._untested = (*code_problem, *describe_untested(good, bad))
        self._tests: list[BisectTest] = []
        self._sides = (math.nan, math.nan)
        self._noise = noise_floor([], _PRIORS[metric])
        self.sigmas = self._measure_sides() if self._factors else math.inf

    def _measure_sides(self) -> float:
        """Measures both sides and the noise; returns how many deviations they are apart."""
        good = [self._value_of(self._good, ())]
        good += [self._run_or_nan((), seed) for seed in range(1, self._repeats() + 1)]
        finite = [value for value in good if value > 0]
        self._noise = noise_floor(finite, _PRIORS[self._metric])
        bad = self._value_of(self._bad, self._factors)
        self._sides = float(np.median(finite)) if finite else math.nan, bad
        if math.isnan(bad) or not finite:
            return math.inf
        return abs(math.log(bad / self._sides[0])) / (math.sqrt(2) * self._noise.deviation)

    def bisect(self, most_tests: int) -> Bisection:
        """Runs mixtures until the culprits are known."""
        if not self._factors:
            return self._outcome((), "no input that a run here can switch differs between the two")
        middle, worst = self._sides
        apart = (
            f"{self._metric} after {self._steps} steps: {middle:.5g} and {worst:.5g}, "
            f"{self.sigmas:.1f} sigma apart ({self._noise.peers} runs)"
        )
        if self.sigmas < _SIGMAS:
            return self._outcome((), f"nothing beyond noise: {apart}")

        def test(changes: tuple[Factor, ...]) -> TestResult:
            value = worst if changes == self._factors else self._decided(changes)
            result = nearer_side(value, middle, worst)
            names = tuple(change.name for change in changes)
            self._tests.append(BisectTest(changes=names, value=value, result=result))
            return result

        found = find_culprits(self._factors, test, most_tests=most_tests)
        names = [factor.name for factor in found.changes]
        if len(names) == 1:
            verdict = f"`{names[0]}` makes it bad"
        else:
            verdict = f"{', '.join(f'`{name}`' for name in names)} make it bad only together"
        if not found.minimal:
            verdict += ", or some of them do: not all could be told apart"
        if [factor.kind for factor in found.changes] == ["code"] and self._code is not None:
            verdict += self._first_bad_commit(middle, worst)
        return self._outcome(tuple(names), f"{verdict}; {apart}")

    def _outcome(self, culprits: tuple[str, ...], verdict: str) -> Bisection:
        return Bisection(
            metric=self._metric,
            steps=self._steps,
            factors=tuple(factor.name for factor in self._factors),
            culprits=culprits,
            tests=tuple(self._tests),
            reruns=self.reruns,
            verdict=verdict,
            untested=self._untested,
        )

    def _repeats(self) -> int:
        return _SEEDS if self._metric == "loss" else 1

    def _decided(self, changes: tuple[Factor, ...]) -> float:
        """The metric of a mixture; where it lies between both sides, the mean of several runs."""
        values = [self._run_or_nan(changes)]
        while len(values) <= _MOST_REPEATS and self._is_between(values):
            values.append(self._run_or_nan(changes, seed=len(values)))
        return float(np.exp(np.mean(np.log(values))))

    def _is_between(self, values: Sequence[float]) -> bool:
        good, bad = self._sides
        if not all(value > 0 for value in (*values, good, bad)):
            return False
        share = math.log(float(np.median(values)) / good) / math.log(bad / good)
        return abs(share - 0.5) < _BETWEEN

    def _value_of(self, record: RunRecord, changes: tuple[Factor, ...]) -> float:
        """The metric of a recorded run; a step time is measured again, on today's machine."""
        if self._metric == "loss":
            return metric_value(record.folder, "loss", self._steps)
        return self._run_or_nan(changes)

    def _run_or_nan(self, changes: tuple[Factor, ...], seed: int = 0) -> float:
        """The metric of a mixture; NaN if it cannot be run, or its loss is not finite."""
        try:
            return self._run(changes, seed)
        except RunBroken:
            return math.nan

    def _run(self, changes: tuple[Factor, ...], seed: int = 0) -> float:
        run = self._short_run(changes, seed)
        if _steps_of(run.folder) < self._steps:
            run_shortly(run)
            self.reruns += 1
        if self._progress is not None:
            self._progress("short runs", self.reruns, None)
        return metric_value(run.folder, self._metric, self._steps)

    def _short_run(self, changes: tuple[Factor, ...], seed: int) -> ShortRun:
        """The run of a mixture; where it was killed earlier, in another folder."""
        tree = mixed_request(self._good, self._bad, changes)
        if seed:
            train = tree.setdefault("train", {})
            train["seed"] = int(train.get("seed", 0)) + 1000 * seed
        text = tomli_w.dumps(tree)
        kinds = {change.kind for change in changes}
        plan = (self._bad if "plan" in kinds else self._good).folder / PLAN_FILE
        code = self._code[1 if "code" in kinds else 0] if self._code else None
        named = (text, *sorted(change.name for change in changes), str(self._steps), self._metric)
        digest = hashlib.sha256("\n".join(named).encode()).hexdigest()[:_HASH_DIGITS]
        folder = _free_folder(self._root, f"{self._group.replace(' ', '-')}-{digest}", self._steps)
        request = self._root / f".{self._group.replace(' ', '-')}-{digest}.toml"
        atomic_write(request, text)
        return ShortRun(
            request=request,
            plan=plan if any(factor.kind == "plan" for factor in self._factors) else None,
            steps=self._steps,
            folder=folder,
            group=self._group,
            variables=mixed_variables(self._good, self._bad, changes),
            source=code.source if code else None,
            directory=code.directory if code else None,
        )

    def _first_bad_commit(self, good: float, bad: float) -> str:
        """Half a sentence on the first commit with which the run is bad."""
        if self._code is None:
            return ""
        run = self._short_run(tuple(f for f in self._factors if f.kind == "code"), 0)
        commit = find_first_bad_commit(self._code, run, self._metric, (good, bad))
        return f", since commit {commit}" if commit else ""


def _require_comparable(good: RunRecord, bad: RunRecord, metric: str | None) -> None:
    if metric not in (None, "loss", "seconds"):
        raise RequestError(f"`{metric}` is no metric; write `loss` or `seconds`")
    if good.id == bad.id:
        raise RecordError(f"both names mean run `{good.folder.name}`; name a good and a bad one")
    for record in (good, bad):
        if record.request is None or not record.steps:
            raise RecordError(
                f"run `{record.folder.name}` has no request or no step; bisect needs runs of "
                "`windlass train`"
            )


def _metric(good: RunRecord, bad: RunRecord) -> Metric:
    """The loss, unless only the step time differs."""
    last = min(good.steps[-1].step, bad.steps[-1].step)
    losses = [metric_value(record.folder, "loss", last) for record in (good, bad)]
    if not all(map(math.isfinite, losses)) or abs(math.log(losses[1] / losses[0])) > _CLEAR_CHANGE:
        return "loss"
    times = [metric_value(record.folder, "seconds", last) for record in (good, bad)]
    return "seconds" if abs(math.log(times[1] / times[0])) > 2 * _CLEAR_CHANGE else "loss"


def _steps_that_tell(good: RunRecord, bad: RunRecord, metric: Metric) -> int:
    """As few steps as tell both runs apart; all that both have if none do."""
    most = min(good.steps[-1].step, bad.steps[-1].step)
    if metric == "seconds":
        return min(most, _TIMED_STEPS)
    first, second = (
        np.array([step.loss for step in record.steps[:most]]) for record in (good, bad)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = ~(np.abs(np.log(second / first)) <= _CLEAR_CHANGE)
    for step in range(len(apart) - _CLEAR_STEPS):
        if apart[step : step + _CLEAR_STEPS].all():
            return min(most, max(_FEWEST_STEPS, step + _MORE_STEPS))
    return most


def _steps_of(folder: Path) -> int:
    """The last step on record in a run folder; 0 if there is none."""
    if not folder.is_dir():
        return 0
    series = read_series(folder).get("loss")
    return int(series.steps[-1]) if series is not None and len(series.steps) else 0


def _free_folder(root: Path, name: str, steps: int) -> Path:
    """A folder that does not exist yet, or one with a run of as many steps."""
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        if not folder.exists() or _steps_of(folder) >= steps:
            return folder
        number += 1
