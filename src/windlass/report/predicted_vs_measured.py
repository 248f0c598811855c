"""Predicted beside measured, as values: medians, so that one slow step does not colour a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from windlass.program.device_mesh import MeshCoord, mesh_coord
from windlass.program.instruction import BLOCKING_KINDS
from windlass.schema.plan import Parallelism
from windlass.schema.prediction import Prediction, TierPeak
from windlass.schema.run_record import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """One number, predicted and measured; None where not known."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where there is no such number."""
        if self.predicted is None or self.measured is None or self.predicted <= 0:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTime:
    """How one device of several spends a step: medians."""

    rank: int
    coord: MeshCoord
    busy_seconds: float
    """Computing, sending and moving."""
    waiting_seconds: float
    """For messages, and in meetings with other devices."""
    memory_bytes: int | None
    """At the peak; None where it was not told."""


def rank_step_times(
    devices: Sequence[Sequence[Step]], cut: Parallelism
) -> tuple[RankStepTime, ...]:
    """How each device that told a step spends one.

    Args:
        devices: the steps of each.
        cut: of the plan that they ran.
    """
    return tuple(
        _share(device, mesh_coord(device, cut), without_warmup(steps))
        for device, steps in enumerate(devices)
        if steps and device < cut.devices
    )


def _share(device: int, place: MeshCoord, steps: Sequence[Step]) -> RankStepTime:
    waiting = [sum(step.by_kind.get(kind, 0.0) for kind in BLOCKING_KINDS) for step in steps]
    busy = [step.seconds - waited for step, waited in zip(steps, waiting, strict=True)]
    told = [step.device_memory_bytes for step in steps if step.device_memory_bytes is not None]
    return RankStepTime(
        rank=device,
        coord=place,
        busy_seconds=median(busy),
        waiting_seconds=median(waiting),
        memory_bytes=max(told, default=None),
    )


def without_warmup(steps: Sequence[Step]) -> Sequence[Step]:
    """All steps but the first, which compiles and fills caches; all if there is only one."""
    return steps[1:] if len(steps) > 1 else steps


def median_step_seconds(steps: Sequence[Step]) -> float | None:
    """The median step time; None before the first step."""
    seconds = [step.seconds for step in without_warmup(steps) if math.isfinite(step.seconds)]
    return median(seconds) if seconds else None


def tokens_per_second(steps: Sequence[Step]) -> float | None:
    """Tokens of the last step over the median step time."""
    seconds = median_step_seconds(steps)
    return steps[-1].tokens / seconds if seconds else None


def measured_memory_peak(steps: Sequence[Step]) -> int | None:
    """The largest measured memory; None before the first step."""
    return max((step.memory_bytes for step in steps), default=0) or None


def median_traffic(steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Median bytes that a step read from far tiers and wrote to them; None before the first."""
    if not steps:
        return None, None
    of = without_warmup(steps)
    return median(step.read_bytes for step in of), median(step.written_bytes for step in of)


def device_memory_peak(prediction: Prediction | None) -> TierPeak | None:
    """The predicted peak of the nearest tier; None if there is none."""
    return prediction.peaks[0] if prediction is not None and prediction.peaks else None


def seconds_by_kind(steps: Sequence[Step], prediction: Prediction | None) -> tuple[MetricPair, ...]:
    """Seconds of a step by instruction kind, the largest first."""
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
    return tuple(sorted(pairs, key=lambda p: -max(p.predicted or 0.0, p.measured or 0.0)))


def headline_metrics(steps: Sequence[Step], prediction: Prediction | None) -> dict[str, MetricPair]:
    """By name: step time `seconds`, speed `tokens`, `mfu`, `memory`, and traffic `read`, `written`.

    Traffic is there only where something moves.
    """
    seconds = median_step_seconds(steps)
    peak = device_memory_peak(prediction)
    mfu = (
        prediction.model_flop / (seconds * prediction.peak_flop_rate)
        if prediction and seconds
        else None
    )
    return {
        "seconds": MetricPair(
            name="step time",
            predicted=prediction.step_seconds if prediction else None,
            measured=seconds,
        ),
        "tokens": MetricPair(
            name="tokens per second",
            predicted=prediction.tokens_per_second if prediction else None,
            measured=tokens_per_second(steps),
        ),
        "mfu": MetricPair(
            name="MFU", predicted=prediction.mfu if prediction else None, measured=mfu
        ),
        "memory": MetricPair(
            name="memory at the peak",
            predicted=float(peak.peak_bytes) if peak else None,
            measured=measured_memory_peak(steps),
        ),
        **_traffic(steps, prediction),
    }


def _traffic(steps: Sequence[Step], prediction: Prediction | None) -> dict[str, MetricPair]:
    """Bytes a step to and from far tiers; measured is the median, which no settling colours."""
    far = prediction.offload if prediction else None
    read, written = median_traffic(steps)
    if far is None and not (read or written):
        return {}
    return {
        "read": MetricPair(
            name="read a step", predicted=float(far.read_bytes) if far else None, measured=read
        ),
        "written": MetricPair(
            name="written a step",
            predicted=float(far.written_bytes) if far else None,
            measured=written,
        ),
    }
