"""TorchEngine: one rank of PyTorch's own distributed stack, as the training loop runs it."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from windlass.data import TrainingBatches
from windlass.engines.torch.evaluation import PassWeights, StageMessages
from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.optimizer import StageOptimizer
from windlass.engines.torch.passes import OneStage, Passes, PipelinedStages
from windlass.engines.torch.state import StageState
from windlass.engines.torch.step_data import StepData
from windlass.engines.torch.weights import StageWeights
from windlass.errors import RunBroken
from windlass.program import layers_of_stage
from windlass.runtime import (
    OTHER_WORK_SLOT,
    BrokenStep,
    Checkpoint,
    CompileHeartbeat,
    Evaluations,
    ExpertLoad,
    HandlerWrapper,
    HeartbeatSlots,
    LayerTemplate,
    LossScale,
    RankContext,
    RankPasses,
    RunCheckpoints,
    SavedFile,
    StepInputs,
    StepState,
    TimelineRecorder,
    TransferStats,
    rank_templates,
    reduce_outcome,
    whole_templates,
)


class TorchOutcome:
    """What came of a step on all ranks."""

    loss_scale: LossScale | None = None

    def __init__(self) -> None:
        self.loss = self.gradient_norm = math.nan
        self.should_stop = False


class TorchEngine:
    """The layers, optimizer, checkpoints and evaluations of a rank."""

    def __init__(
        self,
        context: RankContext,
        batches: TrainingBatches,
        stop: Callable[[], bool],
        heartbeat: HeartbeatSlots | None = None,
        wrap_handlers: HandlerWrapper | None = None,
    ) -> None:
        del wrap_handlers  # there are no instructions to wrap
        plan, device = context.plan, context.device
        self._context, self._stop, self.heartbeat = context, stop, heartbeat
        self.dist = MeshRank(plan, context.rank, device)
        self._compile_heartbeat: CompileHeartbeat | None = None
        if heartbeat is not None and plan.compile:
            self._compile_heartbeat = CompileHeartbeat(heartbeat)
        self._templates = rank_templates(context, self.dist)
        _require_dense_gradients(self._templates)
        inputs = StepInputs(context, batches, self.dist.coord.data_rank, self.dist.context)
        self._data = StepData(context, inputs, heartbeat)
        self._stage = StageWeights(context, self.dist, self._templates, self._data)
        self._optimizer = StageOptimizer(context.settings, device, self._stage.weights, self.dist)
        self._state = StageState(context, self.dist, self._stage, self._optimizer)
        self.checkpoints = RunCheckpoints(
            context, batches.batch, self._templates, save_layer=self._save_layer,
            rank=self.dist.rank, world_size=self.dist.world_size,
            before_save=self._state.stage_save,
        )  # fmt: skip
        self._broken = BrokenStep(inputs, batches, plan.batch.micro, device.torch_device)
        self._passes = self._make_passes()
        pass_weights = PassWeights(context, self._stage)
        self.evaluations = self._make_evaluations(batches, pass_weights)
        computed = frozenset(layers_of_stage(plan, self.dist.coord.stage))
        self.experts = ExpertLoad(
            pass_weights.layers, self._templates, computed, device,
            counts=self.dist.coord.tensor_rank == 0,
        )  # fmt: skip
        self.outcome = TorchOutcome()
        self._seconds: dict[str, float] = {}

    def _make_passes(self) -> Passes:
        plan, chunks = self._context.plan, self._stage.chunks
        if plan.parallel.pipeline > 1:
            return PipelinedStages(self._context, self.dist, chunks, self._templates)
        return OneStage(chunks[0], plan.batch.accumulation, reshard=bool(plan.sharding.reshard))

    def _make_evaluations(self, batches: TrainingBatches, weights: PassWeights) -> Evaluations:
        several = self._context.plan.parallel.pipeline > 1
        messages = StageMessages(self._context, self.dist, self._templates) if several else None
        passes = RankPasses(
            context=self._context, store=weights, templates=self._templates,
            whole_templates=whole_templates(self._context, self.dist, self._templates),
            dist=self.dist, p2p=messages, on_progress=self._count_other_work,
        )  # fmt: skip
        every_layer = frozenset(range(len(self._templates)))
        return Evaluations(
            passes=passes, batches=batches, averaging=None,
            no_grad_layers=frozenset() if self._context.plan.compile else every_layer,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        """Number of the batch that the step takes."""
        return self._data.inputs.batch

    def initialize(self, resume: Checkpoint | None) -> None:
        """Loads the state of a checkpoint; that of a new run is there."""
        if resume is not None:
            self._state.load(resume)

    def warm_up(self, step: int) -> None:
        """Does nothing: the first step compiles."""

    def run_step(
        self, step: int, recorder: TimelineRecorder | None, sample_memory: Callable[[], int]
    ) -> None:
        """Runs one step; its timeline is not recorded.

        Raises:
            RunBroken: a loss or gradient is not finite; it has changed no weight.
        """
        del recorder, sample_memory
        start = time.perf_counter()
        self._optimizer.drop_gradients()
        self._data.begin_step(step)
        self.experts.begin_step()
        self._passes.run(self._data.inputs.loss_weights)
        passed = time.perf_counter()
        self._optimizer.reduce_gradients()
        self._reduce_outcome()
        reduced = time.perf_counter()
        self._optimizer.update(step, self.outcome.gradient_norm)
        self._context.device.synchronize()
        end = time.perf_counter()
        self._seconds = {
            "backward": passed - start, "grad_norm": reduced - passed, "update": end - reduced
        }  # fmt: skip

    def _reduce_outcome(self) -> None:
        """Sums loss, norm and requests to stop over all ranks."""
        losses, outcome = self._data.losses, self.outcome
        totals = StepState(losses=losses).totals(
            self._optimizer.norms(), self._data.inputs.wide_weights
        )
        outcome.gradient_norm, outcome.loss, outcome.should_stop = reduce_outcome(
            totals, losses, self._broken, self.experts, self.dist, stop=self._stop()
        )
        if not math.isfinite(outcome.gradient_norm):
            raise self._gradient_error()

    def _gradient_error(self) -> RunBroken:
        names = self._optimizer.broken_weights()
        which = f"gradient of `{names[0]}`" if names else "gradient norm"
        step = self._data.inputs.step
        return RunBroken(f"the {which} is not finite at step {step}, although its losses are")

    def flush_updates(self) -> None:
        """Does nothing: no update is deferred."""

    def take_transfers(self) -> TransferStats:
        """Nothing: no tensor leaves the device between passes."""
        return TransferStats()

    def step_seconds(self) -> float:
        """Duration of the last step."""
        return sum(self._seconds.values())

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds of the last step: all passes, norm and update."""
        return dict(self._seconds)

    def arrivals_by_kind(self) -> dict[str, float]:
        """Nothing: torch's collectives are not timed apart."""
        return {}

    def close(self) -> None:
        """Waits for the save under way, and ends all threads."""
        self.checkpoints.close()
        self._data.close()
        if self._compile_heartbeat is not None:
            self._compile_heartbeat.close()

    def _save_layer(self, index: int, path: Path) -> Sequence[SavedFile]:
        saved = self._state.save_layer(index, path)
        self._count_other_work()
        return saved

    def _count_other_work(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat[OTHER_WORK_SLOT] += 1


def _require_dense_gradients(templates: Sequence[LayerTemplate]) -> None:
    """Lets embeddings return whole gradients, the only ones that FSDP reduces."""
    for template in templates:
        for module in template.module.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False
