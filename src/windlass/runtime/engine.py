"""RankEngine: what the training loop asks of the software that computes the steps of one rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from windlass.data import TrainingBatches
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.run_checkpoints import RunCheckpoints
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.expert_load import ExpertLoad
from windlass.runtime.inference.held_out_loss import Evaluations
from windlass.runtime.interpreter import HeartbeatSlots
from windlass.runtime.offload.transfer_queue import TransferStats
from windlass.runtime.rank_context import RankContext
from windlass.runtime.step.step_state import LossScale
from windlass.runtime.verify.handler_hooks import HandlerWrapper
from windlass.schema import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRecorder:
    """Records the measured timeline of some steps, with memory after every instruction."""

    steps: frozenset[int]
    """Numbers of the steps to record."""
    record: Callable[[int, Timeline], None]
    """Called with the step and its timeline."""


class Outcome(Protocol):
    """What came of the last step, the same on all ranks."""

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the step on all ranks."""

    @property
    def gradient_norm(self) -> float:
        """2-norm over all gradients of the step, before clipping."""

    loss_scale: LossScale | None
    """What losses are multiplied by in the next step; None in other precisions than float16."""
    should_stop: bool
    """Whether any rank asked to stop."""


class RankEngine(Protocol):
    """The software that computes the steps of one rank, with all that it holds."""

    @property
    def dist(self) -> DistContext:
        """The ranks of the run."""

    @property
    def checkpoints(self) -> RunCheckpoints:
        """What the run resumes from and saves."""

    @property
    def evaluations(self) -> Evaluations:
        """What it measures beside its steps."""

    @property
    def outcome(self) -> Outcome:
        """What came of the last step."""

    @property
    def experts(self) -> ExpertLoad:
        """Which experts the tokens of the step took."""

    @property
    def heartbeat(self) -> HeartbeatSlots | None:
        """Slots for the step, the instruction and other work; None if nobody watches."""

    @property
    def batch(self) -> int:
        """Number of the batch that the step takes."""

    def initialize(self, resume: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint."""

    def warm_up(self, step: int) -> None:
        """Compiles what can be before a step."""

    def run_step(
        self, step: int, recorder: TimelineRecorder | None, sample_memory: Callable[[], int]
    ) -> None:
        """Runs one step.

        Args:
            sample_memory: bytes in use, for a timeline.
        """

    def flush_updates(self) -> None:
        """Applies the updates that were deferred to the next step."""

    def take_transfers(self) -> TransferStats:
        """What was transferred between tiers since the last call."""

    def step_seconds(self) -> float:
        """Duration of the last step."""

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds of the last step by instruction kind."""

    def arrivals_by_kind(self) -> dict[str, float]:
        """When the last step came to its collectives, by kind; empty where nobody knows."""

    def close(self) -> None:
        """Waits for the save under way, and ends all threads."""


StartEngine = Callable[
    [
        RankContext,
        TrainingBatches,
        Callable[[], bool],
        HeartbeatSlots | None,
        HandlerWrapper | None,
    ],
    RankEngine,
]
"""Makes the engine of a rank, as `RankParts` does."""
