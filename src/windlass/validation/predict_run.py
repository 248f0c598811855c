"""Predicts step time and peak memory of published runs with 80 % intervals, all runs at once."""

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
"""Returns the seconds of a step by term, each an array [run], from runs and constants by name."""
LAWS: Mapping[str, StepTimeLaw] = {
    "gpu": gpu.step_terms, "ipu": ipu.step_terms, "resnet": resnet.step_terms,
    "weight_streaming": weight_streaming.step_terms,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """Predicted step time and memory of a run, beside what was measured."""

    run: PublishedRun
    config: RunConfig
    """The configuration that was predicted; one of the candidates if the row leaves it open."""
    calibration: StackCalibration
    step_seconds: float
    low_seconds: float
    """Lower end of the 80 % interval of step time."""
    high_seconds: float
    by_term: Mapping[str, float]
    """Seconds of the step by term of the law."""
    peak_bytes: float | None
    """Peak memory of the fullest device; None if the law does not predict memory."""
    low_peak_bytes: float | None
    high_peak_bytes: float | None
    fits: bool | None
    """False if even the lower end of peak memory exceeds the device's capacity."""

    @property
    def is_calibration_row(self) -> bool:
        """Whether the constants were fitted to this very row."""
        return self.run.key in self.calibration.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One configuration that one run may have."""

    index: int
    run: PublishedRun
    config: RunConfig


def predict_runs(
    runs: Sequence[PublishedRun], constants_of: Callable[[str], StackCalibration] = calibration
) -> list[RunPrediction]:
    """A prediction for each run, in order.

    If a run has several candidate configurations, the fastest that fits is predicted, or the
    fastest of all if none fits.

    Args:
        runs: runs of any stacks.
        constants_of: returns the constants of a stack.
    """
    by_stack: dict[str, list[_Candidate]] = defaultdict(list)
    for index, run in enumerate(runs):
        for config in run.candidates or (run.config,):
            by_stack[run.stack].append(_Candidate(index=index, run=run, config=config))
    best: dict[int, RunPrediction] = {}
    for stack, candidates in by_stack.items():
        predictions = _predict_stack(constants_of(stack), candidates)
        for candidate, prediction in zip(candidates, predictions, strict=True):
            index = candidate.index
            if index not in best or _is_better(prediction, best[index]):
                best[index] = prediction
    return [best[index] for index in range(len(runs))]


def run_columns(runs: Iterable[PublishedRun], configs: Iterable[RunConfig]) -> RunColumns:
    """Runs with these configurations as columns, each on its device in its cluster."""
    catalog = stack_catalog()
    runs = list(runs)
    devices = [
        catalog.stack(run.stack).device_in_cluster(catalog.device(run.device), run.per_host)
        for run in runs
    ]
    return RunColumns([run.shape for run in runs], list(configs), devices)


def _is_better(prediction: RunPrediction, other: RunPrediction) -> bool:
    if prediction.fits != other.fits:
        return bool(prediction.fits)
    return prediction.step_seconds < other.step_seconds


def _predict_stack(
    constants: StackCalibration, candidates: Sequence[_Candidate]
) -> list[RunPrediction]:
    """Predictions of the candidates of one stack, in order."""
    law = stack_catalog().stack(constants.stack).law
    columns = run_columns(
        (candidate.run for candidate in candidates),
        (candidate.config for candidate in candidates),
    )
    terms = LAWS[law](columns, _constants_of_law(constants, law))
    step = np.sum(list(terms.values()), axis=0)
    peaks = peak_bytes(columns, _constants_of_law(constants, "memory")) if law == "gpu" else None
    step_factor, peak_factor = exp(constants.step_spread), exp(constants.memory_spread)
    return [
        RunPrediction(
            run=candidate.run,
            config=candidate.config,
            calibration=constants,
            step_seconds=float(step[at]),
            low_seconds=float(step[at]) / step_factor,
            high_seconds=float(step[at]) * step_factor,
            by_term={name: float(seconds[at]) for name, seconds in terms.items()},
            peak_bytes=None if peaks is None else float(peaks[at]),
            low_peak_bytes=None if peaks is None else float(peaks[at]) / peak_factor,
            high_peak_bytes=None if peaks is None else float(peaks[at]) * peak_factor,
            fits=None if peaks is None else bool(peaks[at] / peak_factor <= columns.capacity[at]),
        )
        for at, candidate in enumerate(candidates)
    ]


def _constants_of_law(constants: StackCalibration, law: str) -> dict[str, float]:
    return {name: constants.values[f"{law}.{name}"] for name in priors(law)}
