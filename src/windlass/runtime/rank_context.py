"""RankContext: what one rank runs, fixed for the whole run and passed as one value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.models import LayerStack
from windlass.program import Program
from windlass.runtime.memory_stats import MemoryLimit
from windlass.schema import STATE_FOLDER, Graph, Plan, SparsityRequest, TrainSettings
from windlass.torch_ext import Device, device_for

LogLikelihoods = Callable[[Sequence[EncodedChoice]], list[ChoiceLikelihood]]
"""How likely a model finds choices, in their order."""


class TaskScorer(Protocol):
    """Scores tasks by the likelihoods of their choices."""

    def metrics(self, log_likelihoods: LogLikelihoods) -> Mapping[str, float]:
        """The metrics by `TASK.METRIC`; asks all ranks for the same choices in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The plan, model, program and folders of one rank."""

    plan: Plan
    """The plan that `program` was lowered from."""
    stack: LayerStack
    """The model. Its layers may lie on the meta device. Real weights are taken over by the run,
    because a large model does not fit twice: they are updated in place, or moved to their store."""
    program: Program
    """The verified program of this rank."""
    settings: TrainSettings
    """Optimizer settings, number of steps, and how often to evaluate and to save."""
    checkpoints: Path
    """The run's checkpoint folder; created when first needed."""
    graph: Graph | None = None
    """The graph that the plan divides over several devices; None on a single device."""
    device: Device = field(default_factory=lambda: device_for("cpu"))
    """The device that holds the tensors and computes. Nothing below makes another one."""
    tasks: TaskScorer | None = None
    """What scores tasks during training; None scores none."""
    memory_limit: MemoryLimit | None = None
    """What keeps this process under its memory budget; None leaves the allocator's limit alone."""

    @property
    def rank(self) -> int:
        """Index of this device among all devices of the plan."""
        return self.program.device

    @property
    def seed(self) -> int:
        """Seed of initial weights and dropout masks."""
        return self.settings.seed

    @property
    def sparsity(self) -> SparsityRequest | None:
        """Which weights the model's layers lack, and when that changes; None if they are dense."""
        return self.plan.model.sparsity if self.plan.model is not None else None

    @property
    def state_folder(self) -> Path:
        """Folder of offloaded state, beside the checkpoints; one per rank."""
        suffix = f"-{self.rank}" if self.rank else ""
        return self.checkpoints.with_name(STATE_FOLDER + suffix)
