"""RankParts: all that one rank of the own runtime trains with, connected to each other."""

from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.data import TrainingBatches
from windlass.models import joined_matrices
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.run_checkpoints import RunCheckpoints
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.compute import ComputeHandlers
from windlass.runtime.distributed.heartbeat import CompileHeartbeat, DeviceHeartbeat
from windlass.runtime.distributed.p2p import P2PCommunicator
from windlass.runtime.distributed.process_groups import DistContext, ProcessGroups, SingleProcess
from windlass.runtime.engine import TimelineRecorder
from windlass.runtime.inference.held_out_loss import Evaluations
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.interpreter import OTHER_WORK_SLOT, HeartbeatSlots, Interpreter, timer_for
from windlass.runtime.layer_templates import LayerTemplate, layer_templates
from windlass.runtime.offload.activations import ActivationOffloader
from windlass.runtime.offload.transfer_queue import (
    TransferStats,
    transfer_queue_for,
)
from windlass.runtime.optimizer_state.optimizer_state import averaging_of
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext
from windlass.runtime.sparsity.mask_updates import mask_updates
from windlass.runtime.step_graph import StepGraph
from windlass.runtime.verify.handler_hooks import HandlerWrapper, HookContext
from windlass.torch_ext import sealed_compile_cache


class RankParts:
    """The store, the handlers, the communicators, the checkpoints and the evaluations of a rank."""

    def __init__(
        self,
        context: RankContext,
        batches: TrainingBatches,
        stop: Callable[[], bool],
        heartbeat: HeartbeatSlots | None,
        wrap_handlers: HandlerWrapper | None,
    ) -> None:
        plan, device, graph = context.plan, context.device, context.graph
        self._context = context
        stack = context.stack
        joined = joined_matrices(zip(stack.names, stack.layers, strict=True))
        optimizer = Optimizer(context.settings, device, plan.moments, joined)
        self._groups = ProcessGroups(plan, graph, context.rank, device) if graph else None
        """The groups of this rank; None if it is the only one."""
        self.dist: DistContext = self._groups or SingleProcess()
        self._queue = transfer_queue_for(plan, device)
        """Carries transfers between tiers; None if the plan has none."""
        self._templates = rank_templates(context, self.dist)
        self.checkpoints = RunCheckpoints(
            context, batches.batch, self._templates, save_layer=self._save_layer,
            rank=self.dist.rank, world_size=self.dist.world_size,
        )  # fmt: skip
        self._store = ParamStore(
            context, optimizer, self._groups, self._queue, before_update=self.checkpoints.wait_for
        )
        self._activations: ActivationOffloader | None = None
        if self._queue is not None and plan.is_offloaded("activations"):
            self._activations = ActivationOffloader(
                self._queue, plan.offload.activations, context.state_folder, device
            )
        self._compute = ComputeHandlers(
            context, self._store, self._templates, optimizer=optimizer, batches=batches, stop=stop,
            dist=self.dist, activations=self._activations,
        )  # fmt: skip
        self.outcome, self.experts = self._compute.outcome, self._compute.experts
        self._mask_updates = mask_updates(context, self._store, self._templates, self._groups)
        self._p2p: P2PCommunicator | None = None
        """Exchanges messages with other pipeline stages; None if this rank is the only one."""
        if self._groups:
            self._p2p = P2PCommunicator(context, self._groups, self._store, self._templates)
        self.evaluations = self._evaluations(context, batches)
        self._device_heartbeat: DeviceHeartbeat | None = None
        self._compile_heartbeat: CompileHeartbeat | None = None
        self._connect_interpreter(context, heartbeat, wrap_handlers)
        self._runner: Interpreter | StepGraph = self._interpreter
        """What ran the last step, and knows its times."""
        self._step_graph: StepGraph | None = None
        """Runs a step recorded once; None if the plan records none."""
        if plan.step_graph and wrap_handlers is None:  # hooks see instructions, which it has none
            self._step_graph = StepGraph(
                context, self._compute, self._templates, before_update=self.checkpoints.wait_for
            )

    def _evaluations(self, context: RankContext, batches: TrainingBatches) -> Evaluations:
        passes = RankPasses(
            context=context, store=self._store, templates=self._templates,
            whole_templates=whole_templates(context, self.dist, self._templates), dist=self.dist,
            p2p=self._p2p, on_progress=self._count_other_work,
        )  # fmt: skip
        return Evaluations(
            passes=passes,
            batches=batches,
            averaging=averaging_of(context.settings),
            no_grad_layers=self._compute.no_grad_layers,
        )

    def _connect_interpreter(
        self,
        context: RankContext,
        heartbeat: HeartbeatSlots | None,
        wrap_handlers: HandlerWrapper | None,
    ) -> None:
        """Gives all handlers to an interpreter, which says by a heartbeat where it is."""
        handlers = dict(self._compute.handlers())
        if self._p2p:
            handlers |= self._p2p.handlers()
        if wrap_handlers is not None:
            hooks = HookContext(context.plan, context.graph, self._compute, self._groups)
            handlers = dict(wrap_handlers(handlers, hooks))
        timer = timer_for(context.device, len(context.program.instructions))
        if heartbeat is not None and context.device.is_asynchronous:
            self._device_heartbeat = DeviceHeartbeat(
                heartbeat, timer.finished_calls, context.device
            )
            heartbeat = self._device_heartbeat.host_slots
        if heartbeat is not None and context.plan.compile:
            self._compile_heartbeat = CompileHeartbeat(heartbeat)
        self.heartbeat = heartbeat
        """Slots for the step, the instruction and other work; None if nobody watches."""
        self._interpreter = Interpreter(context.program, handlers, timer, heartbeat)

    @property
    def batch(self) -> int:
        """Number of the batch that the step takes."""
        return self._compute.inputs.batch

    def initialize(self, resume: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint."""
        if resume:
            self.outcome.resume_loss_scale(resume.manifest.loss_scale)
        self._store.initialize(resume)

    def warm_up(self, step: int) -> None:
        """Compiles what can be before a step."""
        plan = self._context.plan
        # A pipeline stage has no input and no gradient of its own to warm up with.
        if plan.compile and plan.parallel.pipeline == 1:
            with sealed_compile_cache():
                self._compute.warm_up(step)

    def run_step(
        self, step: int, recorder: TimelineRecorder | None, sample_memory: Callable[[], int]
    ) -> None:
        """Runs one step, and records its timeline if the recorder asks for it."""
        self._compute.begin_step(step)
        if self._mask_updates:
            self._mask_updates.begin_step(step)
        if self._p2p:
            self._p2p.step_state = self._compute.state
        self._run_instructions(step, recorder, sample_memory)
        if self._groups:
            self._groups.wait_for_sends()
        if self._mask_updates:
            self._mask_updates.end_step(step, self._compute.state.block_scores)

    def _run_instructions(
        self, step: int, recorder: TimelineRecorder | None, sample_memory: Callable[[], int]
    ) -> None:
        """Runs a step that has begun: recorded, unless its timeline is asked for."""
        graph, self._runner = self._step_graph, self._interpreter
        if recorder is not None and step in recorder.steps:
            memory = self._interpreter.run_sampled(sample_memory)
            recorder.record(step, self._interpreter.timeline(memory))
        elif graph is not None and graph.is_warm:
            self._runner = graph
            graph.run()
        else:
            self._interpreter.run()
        if graph is not None:
            graph.note_step()

    def flush_updates(self) -> None:
        """Applies the updates that were deferred to the next step."""
        self._store.flush_deferred_updates(self._context.program)

    def take_transfers(self) -> TransferStats:
        """What was transferred between tiers since the last call."""
        return TransferStats() if self._queue is None else self._queue.take_stats()

    def step_seconds(self) -> float:
        """Duration of the last step."""
        return self._runner.step_seconds()

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds of the last step by instruction kind."""
        return self._runner.seconds_by_kind()

    def arrivals_by_kind(self) -> dict[str, float]:
        """When the last step came to its collectives, by kind; empty on a single device."""
        return self._interpreter.arrivals_by_kind() if self._groups else {}

    def close(self) -> None:
        """Waits for the save under way, and ends all threads."""
        self.checkpoints.close()
        self._compute.close()
        if self._device_heartbeat is not None:
            self._device_heartbeat.close()
        if self._compile_heartbeat is not None:
            self._compile_heartbeat.close()
        if self._queue is not None:
            self._queue.close()
        if self._activations is not None:
            self._activations.close()
        self._store.close()

    def _save_layer(self, index: int, path: Path) -> Sequence[SavedFile]:
        """Saves one layer, from the saver's thread."""
        saved = self._store.save_layer(index, path)
        self._count_other_work()
        return saved

    def _count_other_work(self) -> None:
        """Gives a sign of life between instructions."""
        if self.heartbeat is not None:
            self.heartbeat[OTHER_WORK_SLOT] += 1


def rank_templates(
    context: RankContext, ranks: DistContext, *, whole: bool = False
) -> tuple[LayerTemplate, ...]:
    """The template of each layer, as the plan computes it on a rank.

    Args:
        whole: whether templates take whole sequences, even if ranks divide those of training.
    """
    plan = context.plan
    return layer_templates(
        context.stack,
        compiled=plan.compile and not whole,
        tp_rank=ranks.tensor_parallel,
        experts=ranks.experts,
        context=None if whole else ranks.context,
        sequence=plan.batch.sequence,
        loss=plan.loss,
        attention=plan.attention,
        z_loss=context.settings.z_loss or 0.0,
        float8=plan.multiplies_float8,
    )


def whole_templates(
    context: RankContext, ranks: DistContext, own: tuple[LayerTemplate, ...]
) -> tuple[LayerTemplate, ...]:
    """Templates that take whole sequences: a rank's own, unless ranks divide those of training."""
    return own if ranks.context.degree == 1 else rank_templates(context, ranks, whole=True)
