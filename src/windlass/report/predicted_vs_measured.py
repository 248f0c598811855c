"""Predicted and measured numbers of a run; medians, so that one slow step does not count."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from windlass.program import BLOCKING_KINDS, MeshCoord, mesh_coord
from windlass.report.formatting import describe_contention
from windlass.schema import Parallelism, Prediction, Step, TierPeak
from windlass.units import format_bytes, format_seconds

_MEMORY_FACTOR = 1.2
"""Most that a measured peak may be of its prediction before it is said: the worst of the plans that
were drawn at random on one machine measured 1.16 times its prediction (docs/design/accuracy.md)."""
_PART_SHARE = 0.05
"""Share of the predicted step by which a part misses its prediction before it is said."""
_NEGLIGIBLE_SHARE = 0.0005
"""Share of the step below which an instruction kind is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """One number, predicted and measured; None where unknown."""

    name: str
    predicted: float | None
    measured: float | None
    interval: tuple[float, float] | None = None
    """Where the measured number is expected: of times in the 80 % interval of the prediction; None
    if nothing is said of it."""

    @property
    def outside_interval(self) -> bool:
        """Whether the measured number lies outside the predicted interval."""
        if self.measured is None or self.interval is None:
            return False
        return not self.interval[0] <= self.measured <= self.interval[1]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where either is unknown or the prediction is 0."""
        if self.predicted is None or self.measured is None or self.predicted <= 0:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTime:
    """How one of several ranks spends a step: medians."""

    rank: int
    coord: MeshCoord
    busy_seconds: float
    """Time in compute, sends and transfers."""
    waiting_seconds: float
    """Time blocked in receives and collectives."""
    memory_bytes: int | None
    """Peak of the device's memory; None if it was not measured."""


def rank_step_times(
    steps_by_rank: Sequence[Sequence[Step]], parallel: Parallelism
) -> tuple[RankStepTime, ...]:
    """How each rank with at least one measured step spends a step.

    Args:
        steps_by_rank: measured steps, [rank][step].
    """
    return tuple(
        _rank_step_time(rank, mesh_coord(rank, parallel), without_warmup(steps))
        for rank, steps in enumerate(steps_by_rank)
        if steps and rank < parallel.devices
    )


def _rank_step_time(rank: int, coord: MeshCoord, steps: Sequence[Step]) -> RankStepTime:
    waiting = [sum(step.by_kind.get(kind, 0.0) for kind in BLOCKING_KINDS) for step in steps]
    busy = [step.seconds - waited for step, waited in zip(steps, waiting, strict=True)]
    peaks = [step.device_memory_bytes for step in steps if step.device_memory_bytes is not None]
    return RankStepTime(
        rank=rank,
        coord=coord,
        busy_seconds=median(busy),
        waiting_seconds=median(waiting),
        memory_bytes=max(peaks, default=None),
    )


def without_warmup(steps: Sequence[Step]) -> Sequence[Step]:
    """All steps but the first, which compiles and fills caches; a single step is kept."""
    return steps[1:] if len(steps) > 1 else steps


def median_step_seconds(steps: Sequence[Step]) -> float | None:
    """The median step time; None before the first step."""
    seconds = [step.seconds for step in without_warmup(steps) if math.isfinite(step.seconds)]
    return median(seconds) if seconds else None


def mean_contention(steps: Sequence[Step]) -> float | None:
    """Share of the time of all steps for which threads waited for a core; None if unknown."""
    counted = [
        (step.contention, step.seconds)
        for step in without_warmup(steps)
        if step.contention is not None and math.isfinite(step.seconds)
    ]
    seconds = sum(seconds for _, seconds in counted)
    return sum(share * spent for share, spent in counted) / seconds if seconds else None


def tokens_per_second(steps: Sequence[Step]) -> float | None:
    """Tokens of the last step over the median step time; None before the first step."""
    seconds = median_step_seconds(steps)
    return steps[-1].tokens / seconds if seconds else None


def measured_memory_peak(steps: Sequence[Step]) -> int | None:
    """Largest measured memory in bytes; None before the first step."""
    return max((step.memory_bytes for step in steps), default=0) or None


def median_traffic(steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Median bytes that a step reads from and writes to offload tiers; None before the first."""
    if not steps:
        return None, None
    counted = without_warmup(steps)
    read, written = (
        [step.read_bytes for step in counted],
        [step.written_bytes for step in counted],
    )
    return median(read), median(written)


def most_memory_bytes(prediction: Prediction | None) -> float | None:
    """The peak above which a measured one is more than was predicted; None without a prediction."""
    peak = device_memory_peak(prediction)
    return peak.peak_bytes * _MEMORY_FACTOR if peak else None


def device_memory_peak(prediction: Prediction | None) -> TierPeak | None:
    """Predicted peak of device memory; None without a prediction."""
    return prediction.peaks[0] if prediction is not None and prediction.peaks else None


def seconds_by_kind(steps: Sequence[Step], prediction: Prediction | None) -> tuple[MetricPair, ...]:
    """Seconds of a step by instruction kind, largest first; kinds below 0.05 % are left out."""
    measured: dict[str, list[float]] = {}
    for step in without_warmup(steps):
        for kind, seconds in step.by_kind.items():
            measured.setdefault(kind, []).append(seconds)
    predicted = dict(prediction.by_kind) if prediction else {}
    pairs = [
        MetricPair(
            name=kind,
            predicted=predicted.get(kind),
            measured=median(measured[kind]) if kind in measured else None,
        )
        for kind in dict.fromkeys((*predicted, *measured))
    ]
    longest = {pair.name: max(pair.predicted or 0.0, pair.measured or 0.0) for pair in pairs}
    least = _NEGLIGIBLE_SHARE * sum(longest.values())
    spent = (pair for pair in pairs if longest[pair.name] > least)
    return tuple(sorted(spent, key=lambda pair: -longest[pair.name]))


def prediction_notes(steps: Sequence[Step], prediction: Prediction | None) -> tuple[str, ...]:
    """Sentences on time and memory that the prediction misses, and on a machine that was busy."""
    metrics = headline_metrics(steps, prediction)
    seconds, memory = metrics["seconds"], metrics["memory"]
    notes = []
    if seconds.outside_interval and seconds.interval is not None:
        low, high = (format_seconds(end) for end in seconds.interval)
        notes.append(f"the step time is outside its predicted 80 % interval, {low} to {high}")
    if missed := [f"{pair.name} {pair.ratio:.2f} ×" for pair in _missed_parts(steps, prediction)]:
        notes.append(f"parts of the step are far from their predictions: {', '.join(missed)}")
    if memory.outside_interval and memory.ratio and memory.predicted and memory.measured:
        more = format_bytes(round(memory.measured - memory.predicted))
        notes.append(f"memory at the peak is {memory.ratio:.2f} × its prediction, {more} more")
    return tuple(filter(None, (*notes, describe_contention(mean_contention(steps)))))


def _missed_parts(steps: Sequence[Step], prediction: Prediction | None) -> list[MetricPair]:
    """The parts of a step that miss by more than the interval of the step, and by much of it."""
    if prediction is None or prediction.step_seconds <= 0:
        return []
    ends = (prediction.low_seconds, prediction.high_seconds)
    low, high = (end / prediction.step_seconds for end in ends)
    least = _PART_SHARE * prediction.step_seconds
    return [
        pair
        for pair in seconds_by_kind(steps, prediction)
        if pair.name not in BLOCKING_KINDS
        if pair.ratio is not None and not low <= pair.ratio <= high
        if abs((pair.measured or 0.0) - (pair.predicted or 0.0)) > least
    ]


def headline_metrics(steps: Sequence[Step], prediction: Prediction | None) -> dict[str, MetricPair]:
    """Step time `seconds`, speed `tokens`, `mfu`, `memory`, and offload traffic `read`, `written`.

    Traffic is left out where nothing is offloaded.
    """
    seconds = median_step_seconds(steps)
    peak = device_memory_peak(prediction)
    mfu = (
        prediction.model_flop / (seconds * prediction.peak_flop_rate)
        if prediction and seconds
        else None
    )
    ends = (prediction.low_seconds, prediction.high_seconds) if prediction else None
    most_bytes = most_memory_bytes(prediction)

    unit = (prediction.unit if prediction else None) or "tokens"

    def speeds(amount: float) -> tuple[float, float] | None:
        """The interval of an amount in a step over the step time."""
        return (amount / ends[1], amount / ends[0]) if ends and ends[0] > 0 else None

    return {
        "seconds": MetricPair(
            name="step time",
            predicted=prediction.step_seconds if prediction else None,
            measured=seconds,
            interval=ends,
        ),
        "tokens": MetricPair(
            name=f"{unit} per second",
            predicted=prediction.tokens_per_second if prediction else None,
            measured=tokens_per_second(steps),
            interval=speeds(prediction.tokens_per_step) if prediction else None,
        ),
        "mfu": MetricPair(
            name="MFU",
            predicted=prediction.mfu if prediction else None,
            measured=mfu,
            interval=speeds(prediction.model_flop / prediction.peak_flop_rate)
            if prediction
            else None,
        ),
        "memory": MetricPair(
            name="memory at the peak",
            predicted=float(peak.peak_bytes) if peak else None,
            measured=measured_memory_peak(steps),
            interval=(0.0, most_bytes) if most_bytes else None,
        ),
        **_traffic(steps, prediction),
    }


def _traffic(steps: Sequence[Step], prediction: Prediction | None) -> dict[str, MetricPair]:
    """Bytes a step to and from offload tiers; measured medians, as a flush adds to single steps."""
    offload = prediction.offload if prediction else None
    read, written = median_traffic(steps)
    if offload is None and not (read or written):
        return {}
    return {
        "read": MetricPair(
            name="read a step",
            predicted=float(offload.read_bytes) if offload else None,
            measured=read,
        ),
        "written": MetricPair(
            name="written a step",
            predicted=float(offload.written_bytes) if offload else None,
            measured=written,
        ),
    }
