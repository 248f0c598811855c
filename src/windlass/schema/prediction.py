"""Prediction: the step time and memory of a plan, computed before it runs."""

from statistics import NormalDist
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from windlass.document import Document
from windlass.schema.example_shape import ExampleUnit
from windlass.schema.fact_table import fact_table_html
from windlass.units import format_bytes, format_count, format_seconds

MemoryClass = Literal["weights", "gradients", "optimizer", "activations", "working", "runtime"]
"""Classes of memory. `working`: temporary memory of an instruction while it runs. `runtime`: the
process itself."""

DEVIATIONS_OF_80_PERCENT = 1.2816
"""Standard deviations on either side of the mean that hold 80 % of a normal distribution."""


class _FiniteDocument(Document):
    """A document whose numbers are all finite, so that whatever reads it can show them."""

    model_config = ConfigDict(allow_inf_nan=False)


class TierPeak(_FiniteDocument):
    """The peak of one memory tier on one device."""

    tier: str
    capacity_bytes: int
    peak_bytes: int
    by_class: dict[MemoryClass, int]
    """Bytes of each class at the peak."""
    error: float = Field(default=0.0, ge=0, lt=1)
    """Half the width of the peak's 80 % interval, as a share of the peak; 0 where bytes are exact,
    as those of files are."""

    @model_validator(mode="before")
    @classmethod
    def _without_instruction(cls, content: object) -> object:
        """Files of earlier versions name the instruction at the peak, which nothing read."""
        if isinstance(content, dict):
            return {name: value for name, value in content.items() if name != "instruction"}
        return content

    @property
    def low_bytes(self) -> int:
        """Lower end of the 80 % interval of the peak."""
        return round(self.peak_bytes * (1 - self.error))

    @property
    def high_bytes(self) -> int:
        """Upper end of the 80 % interval of the peak."""
        return round(self.peak_bytes * (1 + self.error))

    def overrun_chance(self, capacity_bytes: int) -> float:
        """Predicted chance that the peak exceeds a capacity; 0 or 1 where bytes are exact."""
        if not self.error:
            return float(self.peak_bytes > capacity_bytes)
        deviation = self.error * self.peak_bytes / DEVIATIONS_OF_80_PERCENT
        return 1 - NormalDist(self.peak_bytes, deviation).cdf(capacity_bytes)

    @property
    def over_bytes(self) -> int:
        """Bytes by which the peak exceeds the capacity; 0 if it fits."""
        return max(0, self.peak_bytes - self.capacity_bytes)


class OffloadTraffic(_FiniteDocument):
    """What one step transfers between device memory and the offload tiers."""

    read_bytes: int
    """Bytes read from offload tiers."""
    written_bytes: int
    """Bytes written to offload tiers."""
    seconds: float
    """Time of all transfers, one after the other."""
    exposed_seconds: float
    """Part of the step during which the device waits for transfers."""


class Prediction(_FiniteDocument):
    """Predicted step time by term and by instruction kind, and memory by tier and class."""

    plan: str
    """The plan's label."""
    machine: str
    """The machine's label."""
    step_seconds: float
    low_seconds: float
    """Lower end of the 80 % interval of the step time."""
    high_seconds: float
    """Upper end of the 80 % interval of the step time."""
    by_term: dict[str, float]
    """Seconds of a step on the busiest device by term: matmul, attention, traffic, launch, ..."""
    by_kind: dict[str, float]
    """Seconds of a step on the busiest device by instruction kind; sums to `step_seconds`."""
    peaks: tuple[TierPeak, ...]
    """Peak memory of each tier, device memory first."""
    tokens_per_step: int
    """Tokens of a step over all replicas; of a model that takes none, images or examples."""
    unit: ExampleUnit | None = None
    """What `tokens_per_step` counts if it is no tokens."""
    model_flop: float
    """FLOP of one step over all replicas, recomputation not counted (the numerator of MFU)."""
    peak_flop_rate: float
    """Dense FLOP/s of all devices in the plan's precision (the denominator of MFU)."""
    compile_seconds: float = 0.0
    """Compilation time, once per run before the first step."""
    offload: OffloadTraffic | None = None
    """Transfers of offloaded tensors; None if nothing is offloaded."""

    def __repr__(self) -> str:
        return f"<Prediction of plan {self.plan}: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        return fact_table_html(f"predicted for plan {self.plan}", self._facts())

    def _facts(self) -> dict[str, str]:
        low, high = format_seconds(self.low_seconds), format_seconds(self.high_seconds)
        facts = {
            "step": f"{format_seconds(self.step_seconds)} a step (80 % interval {low} to {high})",
            "speed": f"{format_count(self.tokens_per_second)} {self.unit or 'tokens'}/s",
        }
        for peak in self.peaks:
            bytes_ = f"{format_bytes(peak.peak_bytes)} of {format_bytes(peak.capacity_bytes)}"
            facts[peak.tier] = f"{bytes_} in {peak.tier}"
        return facts

    @property
    def offload_efficiency(self) -> float:
        """The share of the step in which the device does not wait for offload transfers."""
        waiting = self.offload.exposed_seconds if self.offload else 0.0
        return 1 - waiting / self.step_seconds

    @property
    def tokens_to_hide_offload(self) -> float:
        """Tokens per step at which computing takes as long as the offload transfers; 0 without.

        Transfers do not grow with the batch and computing does. Waiting of single phases beyond
        that depends on the program, and is part of `step_seconds`.
        """
        if self.offload is None:
            return 0.0
        computing = self.step_seconds - self.offload.exposed_seconds
        return self.tokens_per_step * self.offload.seconds / computing

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all replicas."""
        return self.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: `model_flop / (step_seconds * peak_flop_rate)`.

        Source: Chowdhery et al. 2022, PaLM, appendix B.
        """
        return self.model_flop / (self.step_seconds * self.peak_flop_rate)

    @property
    def fits(self) -> bool:
        """Whether every memory tier fits its peak."""
        return all(peak.over_bytes == 0 for peak in self.peaks)


class SparseSpeedup(_FiniteDocument):
    """Predicted speed of a plan with sparse weights over the same plan with dense ones."""

    dense_seconds: float
    """Predicted seconds of a step with dense weights."""
    speedup: float
    """Predicted speed over dense."""
    limit: float
    """The same if products with sparse weights take the kept share of the dense ones' time and
    everything else takes what it is predicted to (Amdahl's law)."""


class DeviceTimeline(_FiniteDocument):
    """The instructions of one device in one step, with the times when each starts and ends.

    All sequences have one entry for each instruction, [instruction].
    """

    device: int
    """Global rank of the device."""
    kinds: tuple[str, ...]
    layers: tuple[int | None, ...]
    micro_batches: tuple[int | None, ...]
    starts: tuple[float, ...]
    """Seconds since the step began."""
    ends: tuple[float, ...]
    """Seconds since the step began."""
    memory_bytes: tuple[float, ...] = ()
    """Device memory in use while each instruction runs; empty if not known."""

    @model_validator(mode="after")
    def _lists_are_as_long(self) -> Self:
        lists = ("layers", "micro_batches", "starts", "ends", "memory_bytes")
        for name, values in ((name, getattr(self, name)) for name in lists):
            if len(values) != len(self.kinds) and (values or name != "memory_bytes"):
                raise ValueError(
                    f"`{name}` has {len(values)} entries and `kinds` {len(self.kinds)}; each has "
                    "one for each instruction"
                )
        return self


class Timeline(Document):
    """One step of all devices on a common clock: predicted by simulation, or measured."""

    predicted: bool
    devices: tuple[DeviceTimeline, ...]
