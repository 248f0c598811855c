"""Prediction: what a plan will cost, said before it runs. Never printed without that word."""

from typing import Literal

from windlass.document import Document

MemoryClass = Literal["weights", "gradients", "optimizer", "activations", "working", "runtime"]
"""`working`: what an instruction holds only while it runs; `runtime`: the process itself."""


class TierPeak(Document):
    """The fullest moment of one tier on one device."""

    tier: str
    capacity_bytes: int
    peak_bytes: int
    by_class: dict[MemoryClass, int]
    instruction: int
    """Index into the program of the instruction that runs at that moment."""

    @property
    def over_bytes(self) -> int:
        """How much does not fit; 0 if all does."""
        return max(0, self.peak_bytes - self.capacity_bytes)


class OffloadTraffic(Document):
    """What one step moves between the near tier and those beyond it, beside the computing."""

    read_bytes: int
    written_bytes: int
    seconds: float
    """That the moves take, one after the other."""
    exposed_seconds: float
    """Of the step, that the device waits for them."""


class Prediction(Document):
    """Step time by term and by instruction kind, memory by tier and class."""

    plan: str
    """The plan's label."""
    machine: str
    """The machine's label."""
    step_seconds: float
    low_seconds: float
    """The 80 % interval's lower end."""
    high_seconds: float
    """The 80 % interval's upper end."""
    by_term: dict[str, float]
    """Seconds of a step on the busiest device: matmul, attention, traffic, launch, update, ..."""
    by_kind: dict[str, float]
    """Seconds of a step on the busiest device by instruction kind; sums to `step_seconds`."""
    peaks: tuple[TierPeak, ...]
    tokens_per_step: int
    model_flop: float
    """FLOP of one step over all replicas, recompute not counted (the numerator of MFU)."""
    peak_flop_rate: float
    """Dense FLOP/s of all devices in the plan's precision (the denominator of MFU)."""
    compile_seconds: float = 0.0
    """Once per run, before the first step."""
    offload: OffloadTraffic | None = None
    """None where nothing moves."""

    @property
    def offload_efficiency(self) -> float:
        """The step's speed over what it would be if moves took no time."""
        waiting = self.offload.exposed_seconds if self.offload else 0.0
        return 1 - waiting / self.step_seconds

    @property
    def tokens_to_hide_offload(self) -> float:
        """Tokens a step from which on computing takes longer than moving.

        Moves do not grow with the batch and computing does: so many tokens that both take equally
        long. What each phase must wait for beyond that is the program's, and in `step_seconds`.
        """
        if self.offload is None:
            return 0.0
        computing = self.step_seconds - self.offload.exposed_seconds
        return self.tokens_per_step * self.offload.seconds / computing

    @property
    def tokens_per_second(self) -> float:
        """Over all replicas."""
        return self.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: `model_flop / (step_seconds * peak_flop_rate)`.

        Source: Chowdhery et al. 2022, PaLM, appendix B.
        """
        return self.model_flop / (self.step_seconds * self.peak_flop_rate)

    @property
    def fits(self) -> bool:
        """Whether no tier overflows."""
        return all(peak.over_bytes == 0 for peak in self.peaks)


class DeviceTimeline(Document):
    """What one device does, instruction by instruction: start and end in seconds of the step."""

    device: int
    kinds: tuple[str, ...]
    layers: tuple[int | None, ...]
    micro_batches: tuple[int | None, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    memory_bytes: tuple[float, ...] = ()
    """Near tier while each instruction runs; empty if not known."""


class Timeline(Document):
    """One step on a common clock: predicted by simulation, or measured."""

    predicted: bool
    devices: tuple[DeviceTimeline, ...]
