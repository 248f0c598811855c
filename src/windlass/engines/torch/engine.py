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
    stack_templates,
)


class TorchOutcome:
    """What came of a step on all ranks."""

    loss_scale: LossScale | None = None

    def __init__(self) -> None:
        self.loss = self.gradient_norm = math.nan
        self.should_stop = False


class TorchEngine:
    """The layers, optimizer, checkpoints and evaluations of a rank.

    Args:
        context: what this rank runs.
        batches: training and held-out sequences.
        stop: asked at the end of each step.
        heartbeat: receives the step and the pass of each layer as it begins.
        wrap_handlers: not called: the engine has no instructions to wrap.
    """

    def __init__(
        self,
        context: RankContext,
        batches: TrainingBatches,
        stop: Callable[[], bool],
        heartbeat: HeartbeatSlots | None = None,
        wrap_handlers: HandlerWrapper | None = None,
    ) -> None:
        del wrap_handlers
        plan, device = context.plan, context.device
        self._context, self._stop, self.heartbeat = context, stop, heartbeat
        self.dist = MeshRank(plan, context.rank, device)
        self._compile_heartbeat: CompileHeartbeat | None = None
        if heartbeat is not None and plan.compile:
            self._compile_heartbeat = CompileHeartbeat(heartbeat)
        self._templates = _templates(context, self.dist)
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
            whole_templates=self._whole_templates(), dist=self.dist, p2p=messages,
            on_progress=self._count_other_work,
        )  # fmt: skip
        every_layer = frozenset(range(len(self._templates)))
        return Evaluations(
            passes=passes, batches=batches, averaging=None,
            no_grad_layers=frozenset() if self._context.plan.compile else every_layer,
        )  # fmt: skip

    def _whole_templates(self) -> tuple[LayerTemplate, ...]:
        """Templates that take whole sequences."""
        if self.dist.context.degree == 1:
            return self._templates
        return _templates(self._context, self.dist, whole=True)

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
        """Sums loss, norm and requests to stop over all ranks; the host waits for all at once."""
        losses = self._data.losses
        state = StepState(losses=losses)
        totals = state.totals(self._optimizer.norms(), self._data.inputs.wide_weights)
        square, loss, all_finite, *counts = self.experts.beside(totals).cpu().tolist()
        if not all_finite:
            self._broken.require_finite_losses(losses)
        own_loss = 0.0 if self.dist.coord.tensor_rank else loss
        local = (square, own_loss, float(self._stop()), *counts)
        total, self.outcome.loss, stops, *loads = self.dist.all_reduce_sum(local)
        if not math.isfinite(total):
            raise self._gradient_error()
        self.experts.end_step(loads)
        self.outcome.gradient_norm, self.outcome.should_stop = math.sqrt(total), stops > 0

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


def _templates(
    context: RankContext, ranks: MeshRank, *, whole: bool = False
) -> tuple[LayerTemplate, ...]:
    """Each layer as a function of this tensor-parallel rank's weights.

    Args:
        context: what this rank runs.
        ranks: its place in the mesh.
        whole: whether they take whole sequences, even if ranks divide those of training.
    """
    plan = context.plan
    templates = stack_templates(
        context.stack,
        compiled=plan.compile and not whole,
        tp_rank=ranks.tensor_rank(),
        context=None if whole or ranks.context.degree == 1 else ranks.context,
        sequence=plan.batch.sequence,
        loss=plan.loss,
        attention=plan.attention,
        z_loss=context.settings.z_loss or 0.0,
    )
    for template in templates:
        for module in template.module.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False  # FSDP reduces dense gradients alone
    return templates
