"""Predict: step time, peak memory and their 80 % intervals of published runs, all rows at once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from windlass.validation.formulas import Column, ColumnOrFloat
from windlass.validation.laws import gpu, ipu, resnet, weight_streaming
from windlass.validation.laws.gpu_memory import peak_bytes
from windlass.validation.published_run import PublishedRun, RunColumns, RunConfig
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import StackCalibration, calibration, priors

StepTimeLaw = Callable[[RunColumns, Mapping[str, ColumnOrFloat]], dict[str, Column]]
LAWS: Mapping[str, StepTimeLaw] = {
    "gpu": gpu.step_terms, "ipu": ipu.step_terms, "resnet": resnet.step_terms,
    "weight_streaming": weight_streaming.step_terms,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """What a run is predicted to take, beside what it took."""

    run: PublishedRun
    config: RunConfig
    """The one that was taken where the run leaves it open."""
    calibration: StackCalibration
    step_seconds: float
    low_seconds: float
    """The 80 % interval's lower end."""
    high_seconds: float
    by_term: Mapping[str, float]
    """Seconds of the step by what they go into."""
    peak_bytes: float | None
    """Of the fullest device; None where the law says nothing of memory."""
    low_peak_bytes: float | None
    high_peak_bytes: float | None
    fits: bool | None
    """False where even the lower end of peak memory is more than the device has."""

    @property
    def is_calibration_row(self) -> bool:
        """Whether its constants were fitted from this very row."""
        return self.run.key in self.calibration.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One cut that one run may have."""

    index: int
    run: PublishedRun
    cut: RunConfig


def predict_runs(
    runs: Sequence[PublishedRun], constants_of: Callable[[str], StackCalibration] = calibration
) -> list[RunPrediction]:
    """A prediction for each run.

    Of a run that leaves its cut open the fastest that fits counts, and the fastest if none does.

    Args:
        runs: of any stacks.
        by: the constants of a stack.
    """
    by_stack: dict[str, list[_Case]] = defaultdict(list)
    for index, run in enumerate(runs):
        for cut in run.candidates or (run.config,):
            by_stack[run.stack].append(_Case(index=index, run=run, cut=cut))
    best: dict[int, RunPrediction] = {}
    for stack, cases in by_stack.items():
        for case, found in zip(cases, _of_stack(constants_of(stack), cases), strict=True):
            if case.index not in best or _before(found, best[case.index]):
                best[case.index] = found
    return [best[index] for index in range(len(runs))]


def run_columns(runs: Iterable[PublishedRun], cuts: Iterable[RunConfig]) -> RunColumns:
    """Runs with these cuts as columns, each on its device in its cluster."""
    known = stack_catalog()
    runs = list(runs)
    devices = [
        known.stack(run.stack).device_in_cluster(known.device(run.device), run.per_host)
        for run in runs
    ]
    return RunColumns([run.shape for run in runs], list(cuts), devices)


def _before(one: RunPrediction, other: RunPrediction) -> bool:
    if one.fits != other.fits:
        return bool(one.fits)
    return one.step_seconds < other.step_seconds


def _of_stack(found: StackCalibration, cases: Sequence[_Case]) -> list[RunPrediction]:
    """Predictions of the cases of one stack, in order."""
    law = stack_catalog().stack(found.stack).law
    columns = run_columns((case.run for case in cases), (case.cut for case in cases))
    terms = LAWS[law](columns, _of_law(found, law))
    step = np.sum(list(terms.values()), axis=0)
    peaks = peak_bytes(columns, _of_law(found, "memory")) if law == "gpu" else None
    wide, held = exp(found.step_spread), exp(found.memory_spread)
    return [
        RunPrediction(
            run=case.run,
            config=case.cut,
            calibration=found,
            step_seconds=float(step[at]),
            low_seconds=float(step[at]) / wide,
            high_seconds=float(step[at]) * wide,
            by_term={name: float(seconds[at]) for name, seconds in terms.items()},
            peak_bytes=None if peaks is None else float(peaks[at]),
            low_peak_bytes=None if peaks is None else float(peaks[at]) / held,
            high_peak_bytes=None if peaks is None else float(peaks[at]) * held,
            fits=None if peaks is None else bool(peaks[at] / held <= columns.capacity[at]),
        )
        for at, case in enumerate(cases)
    ]


def _of_law(found: StackCalibration, law: str) -> dict[str, float]:
    return {name: found.values[f"{law}.{name}"] for name in priors(law)}
