"""The training loop: a generator of measured steps."""

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from windlass.data import TrainingBatches
from windlass.errors import OutOfMemory, PlanError, RunBroken, RunInterrupted
from windlass.hardware import CpuContention, core_count
from windlass.runtime.checkpoint.checkpoint import (
    Checkpoint,
    checkpoint_name,
    remove_temporaries,
)
from windlass.runtime.checkpoint.run_checkpoints import RunCheckpoints
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.compute import ComputeHandlers, StopRequested
from windlass.runtime.distributed.heartbeat import DeviceHeartbeat
from windlass.runtime.distributed.p2p import P2PCommunicator
from windlass.runtime.distributed.process_groups import DistContext, ProcessGroups, SingleProcess
from windlass.runtime.inference.evaluations import Evaluations
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.interpreter import HeartbeatSlots, Interpreter, timer_for
from windlass.runtime.layer_templates import LayerTemplate, layer_templates
from windlass.runtime.memory_stats import (
    PeakMemory,
    is_out_of_memory,
    requested_bytes_clause,
    usable_bytes,
)
from windlass.runtime.offload.activations import ActivationOffloader
from windlass.runtime.offload.transfer_queue import TransferStats, transfer_queue_for
from windlass.runtime.optimizer_state.averages import averaging_of
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.rank_context import RankContext
from windlass.runtime.sparsity.mask_updates import mask_updates
from windlass.runtime.step_graph import StepGraph
from windlass.runtime.store_choice import store_for
from windlass.runtime.verify.handler_hooks import HandlerWrapper, HookContext
from windlass.schema import Step, Timeline
from windlass.sparsity import last_step_of_leg
from windlass.torch_ext import (
    install_allocator,
    missing_deterministic_kernel,
    numerics,
    sealed_compile_cache,
)

_EXPERT_RECORDS = 100
"""Steps of a run whose load of experts is recorded: a model has thousands of experts."""


def never_stop() -> bool:
    """Returns False: nobody asks to stop."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRecorder:
    """Records the measured timeline of some steps, with memory after every instruction."""

    steps: frozenset[int]
    """Numbers of the steps to record."""
    record: Callable[[int, Timeline], None]
    """Called with the step and its timeline."""


def train_loop(
    context: RankContext,
    batches: TrainingBatches,
    *,
    resume: Checkpoint | None = None,
    stop: Callable[[], bool] = never_stop,
    recorder: TimelineRecorder | None = None,
    heartbeat: HeartbeatSlots | None = None,
    wrap_handlers: HandlerWrapper | None = None,
) -> Generator[Step]:
    """Trains, and yields each step once it is done.

    The first step is 1, or the one after `resume`; the last is `settings.steps`, or the last one
    of the leg whose layers the plan has, after which a checkpoint is on the disk. The yielded steps
    and the weights are bit-identical however often the run was stopped or killed and resumed.

    Args:
        context: what this rank runs. With a graph, this process is one of several ranks, has
            initialized torch.distributed, and yields the same steps as all others do.
        batches: training and held-out sequences.
        resume: the checkpoint to resume from; None starts from the beginning.
        stop: asked before each micro-batch; True saves the last complete step and ends.
        recorder: records the timeline of some steps.
        heartbeat: receives the step and the index of each instruction as it begins.
        wrap_handlers: takes all handlers and returns those to run in their place.

    Raises:
        CheckpointError: `resume` belongs to another model.
        OutOfMemory: memory ran out; the step has no effect.
        PlanError: the plan is deterministic, and an operation has no deterministic kernel.
        RunBroken: a loss or gradient is not finite; it has changed no weight.
        RunInterrupted: `stop` returned True; the state is saved.
        StorageError: a checkpoint could not be written; the one before it is kept.
    """
    run: _Run | None = None
    plan = context.plan
    deterministic, tf32 = bool(plan.deterministic), plan.precision == "tf32"
    try:
        with numerics(context.device, deterministic=deterministic, tf32=tf32):
            run = _Run(context, batches, stop, heartbeat, wrap_handlers)
            yield from run.steps(resume, recorder)
    except (MemoryError, RuntimeError, OSError) as error:
        if deterministic and (complaint := missing_deterministic_kernel(error)):
            raise PlanError(
                f"{complaint.partition(',')[0]}, as `deterministic` = true asks; set it false"
            ) from None
        if not is_out_of_memory(error):
            raise
        requested = requested_bytes_clause(error)
    else:
        return
    finally:
        if run is not None:
            run.close()
    # Outside the except clause, whose error refers to all tensors: what follows needs memory too.
    where = run.where() if run is not None else "before the first step"
    message = f"memory ran out {where}{requested}"
    message += f"; {run.checkpoints.last_good()}" if run is not None else ""
    device = context.device
    del run, resume
    gc.collect()
    raise OutOfMemory(message, available_bytes=usable_bytes(device))


class _Run:
    """The training loop of one rank."""

    def __init__(
        self,
        context: RankContext,
        batches: TrainingBatches,
        stop: Callable[[], bool],
        heartbeat: HeartbeatSlots | None,
        wrap_handlers: HandlerWrapper | None,
    ) -> None:
        install_allocator()
        context.device.activate()
        self._peak = PeakMemory(context.device)
        # Ranks that share cores wait for each other, which says nothing of other processes.
        has_cores = context.plan.parallel.devices <= core_count()
        self._contention = CpuContention() if has_cores else None
        self._context, self._plan = context, context.plan
        self._settings, self._batches = context.settings, batches
        plan, device = context.plan, context.device
        optimizer = Optimizer(context.settings, device, plan.moments)
        self._averaging = averaging_of(context.settings)
        self._current_step, self._cpu_seconds = 1, 0.0
        self._last_step = last_step_of_leg(context.sparsity, context.settings.steps)
        graph = context.graph
        self._groups = ProcessGroups(plan, graph, context.rank, device) if graph else None
        self._dist: DistContext = self._groups or SingleProcess()
        self._queue = transfer_queue_for(plan, device)
        self._templates: tuple[LayerTemplate, ...] = layer_templates(
            context.stack,
            compiled=plan.compile,
            tp_rank=self._groups.tensor_parallel if self._groups else None,
            experts=self._groups.experts if self._groups else None,
            loss=plan.loss,
            attention=plan.attention,
            z_loss=context.settings.z_loss or 0.0,
        )
        self.checkpoints = RunCheckpoints(
            context, batches.batch, self._templates, save_layer=self._save_layer,
            rank=self._dist.rank, world_size=self._dist.world_size,
        )  # fmt: skip
        self.store = store_for(
            context, optimizer, queue=self._queue, groups=self._groups,
            before_update=self.checkpoints.wait_for,
        )  # fmt: skip
        self._activations: ActivationOffloader | None = None
        if self._queue is not None and plan.is_offloaded("activations"):
            self._activations = ActivationOffloader(
                self._queue, plan.offload.activations, context.state_folder, device
            )
        self._compute = ComputeHandlers(
            context,
            self.store,
            self._templates,
            optimizer=optimizer,
            batches=batches,
            stop=stop,
            dist=self._dist,
            activations=self._activations,
        )
        self._mask_updates = mask_updates(context, self.store, self._templates, self._groups)
        handlers = dict(self._compute.handlers())
        self._p2p: P2PCommunicator | None = None
        if self._groups:
            self._p2p = P2PCommunicator(context, self._groups, self.store, self._templates)
            handlers |= self._p2p.handlers()
        passes = RankPasses(
            context=context, store=self.store, templates=self._templates, dist=self._dist,
            p2p=self._p2p, on_progress=self._count_other_work,
        )  # fmt: skip
        self._evaluations = Evaluations(
            passes=passes,
            batches=batches,
            averaging=self._averaging,
            no_grad_layers=self._compute.no_grad_layers,
        )
        if wrap_handlers is not None:
            hooks = HookContext(plan, graph, self._compute, self._groups)
            handlers = dict(wrap_handlers(handlers, hooks))
        timer = timer_for(device, len(context.program.instructions))
        self._device_heartbeat: DeviceHeartbeat | None = None
        if heartbeat is not None and device.is_asynchronous:
            self._device_heartbeat = DeviceHeartbeat(heartbeat, timer.finished_calls, device)
            heartbeat = self._device_heartbeat.host_slots
        self._heartbeat = heartbeat
        self._interpreter = Interpreter(context.program, handlers, timer, heartbeat)
        self._step_graph: StepGraph | None = None
        if plan.step_graph and wrap_handlers is None:  # hooks see instructions, which it has none
            self._step_graph = StepGraph(
                context, self._compute, self._templates, before_update=self.checkpoints.wait_for
            )
        self._runner: Interpreter | StepGraph = self._interpreter
        """What ran the last step, and knows its times."""

    def close(self) -> None:
        """Waits for the save under way, and ends all threads."""
        self.checkpoints.close()
        self._compute.close()
        if self._device_heartbeat is not None:
            self._device_heartbeat.close()
        if self._queue is not None:
            self._queue.close()
        if self._activations is not None:
            self._activations.close()
        self.store.close()
        if self._contention is not None:
            self._contention.close()

    def steps(
        self, resume: Checkpoint | None, recorder: TimelineRecorder | None
    ) -> Generator[Step]:
        """Runs and yields all steps after those of `resume`."""
        done = self._initialize(resume)
        # A pipeline stage has no input and no gradient of its own to warm up with.
        alone = self._plan.parallel.pipeline == 1
        if self._plan.compile and alone and done < self._last_step:
            try:
                with sealed_compile_cache():
                    self._compute.warm_up(done + 1)
            except StopRequested:
                raise self._interrupted(done) from None
        # Transfers and waits before the first step belong to no step.
        self._take_transfer_stats()
        self._take_contention()
        for step in range(done + 1, self._last_step + 1):
            self.checkpoints.raise_if_failed()
            try:
                self._run_step(step, recorder)
            except StopRequested:
                raise self._interrupted(step - 1) from None
            except RunBroken as broken:
                raise RunBroken(
                    f"{broken}; {self.checkpoints.last_good()}, and `windlass resume "
                    f"--skip-batches {self._compute.inputs.batch}` leaves this batch out"
                ) from None
            is_last = step == self._last_step
            saves = is_last or step % self._settings.save_every == 0
            try:
                yield self._measured(step, saves=saves)
            finally:
                # Saved only after the step was yielded: a kill in between would otherwise leave a
                # checkpoint of an unrecorded step. `finally`, in case nobody asks for more steps.
                if saves:
                    self._save(step)
            if is_last:
                self.checkpoints.finish()
            elif self._compute.should_stop:
                raise self._interrupted(step)

    def _initialize(self, resume: Checkpoint | None) -> int:
        """Loads what a run resumes from, or makes the state of a new one; returns the step done."""
        if not self._dist.rank:
            remove_temporaries(self._context.checkpoints)
        done = self.checkpoints.step_of(resume) if resume else 0
        if resume:
            self._compute.resume_loss_scale(resume.manifest.loss_scale)
        self.store.initialize(resume)
        return done

    def _run_step(self, step: int, recorder: TimelineRecorder | None) -> None:
        """Runs one step, and records its timeline if the recorder asks for it."""
        self._current_step = step
        if self._heartbeat is not None:
            self._heartbeat[0] = step
        self._compute.begin_step(step)
        if self._mask_updates:
            self._mask_updates.begin_step(step)
        if self._p2p:
            self._p2p.step_state = self._compute.state
        cpu_start = time.process_time()
        self._run_instructions(step, recorder)
        if self._groups:
            self._groups.wait_for_sends()
        if self._mask_updates:
            self._mask_updates.end_step(step, self._compute.state.block_scores)
        self._cpu_seconds = time.process_time() - cpu_start
        if self._context.memory_limit is not None:
            self._context.memory_limit.apply()

    def _run_instructions(self, step: int, recorder: TimelineRecorder | None) -> None:
        """Runs a step that has begun: recorded, unless its timeline is asked for."""
        graph, self._runner = self._step_graph, self._interpreter
        if recorder is not None and step in recorder.steps:
            memory = self._interpreter.run_sampled(self._peak.sample)
            recorder.record(step, self._interpreter.timeline(memory))
        elif graph is not None and graph.is_warm:
            self._runner = graph
            graph.run()
        else:
            self._interpreter.run()
        if graph is not None:
            graph.note_step()

    def _measured(self, step: int, *, saves: bool) -> Step:
        """The record of the step that just ran; evaluates where due."""
        compute, evaluates = self._compute, self._evaluations.is_due(step)
        contention = self._take_contention()
        flush_start = time.perf_counter()
        if evaluates or saves:
            self.store.flush_deferred_updates(self._context.program)
        flush_seconds = time.perf_counter() - flush_start
        transfers = self._take_transfer_stats()
        evaluation = self._evaluations.after(step)
        if evaluates:
            self._take_transfer_stats()
            self._take_contention()
        peak = self._peak.overall_bytes()
        takes_examples = self._context.stack.examples is not None
        return Step(
            step=step,
            loss=compute.loss,
            gradient_norm=compute.gradient_norm,
            loss_scale=None if compute.loss_scale is None else compute.loss_scale.scale,
            learning_rate=learning_rate(self._settings, step),
            tokens=self._plan.global_batch if takes_examples else self._plan.tokens_per_step,
            seconds=self._runner.step_seconds(),
            memory_bytes=round(self._dist.all_reduce_max(peak)),
            device_memory_bytes=peak if self._groups else None,
            read_bytes=transfers.read_bytes,
            written_bytes=transfers.written_bytes,
            contention=contention,
            flush_seconds=flush_seconds if self._plan.offloads and (evaluates or saves) else 0.0,
            by_kind=self._runner.seconds_by_kind(),
            arrivals=self._interpreter.arrivals_by_kind() if self._groups else {},
            cpu_seconds=self._cpu_seconds,
            held_out_loss=evaluation.loss,
            held_out_bits_per_byte=evaluation.bits_per_byte,
            held_out_loss_ema=evaluation.loss_ema,
            held_out_accuracy=evaluation.accuracy,
            task_scores=evaluation.task_scores,
            expert_load=compute.experts.totals if self._records_experts(step) else {},
            dropped_share=compute.experts.dropped_share,
            saved=checkpoint_name(step) if saves else None,
        )

    def _records_experts(self, step: int) -> bool:
        """Whether the load of experts is recorded: a hundred times in a run, and at its end."""
        steps = self._settings.steps
        return step == steps or step % -(-steps // _EXPERT_RECORDS) == 0

    def _take_contention(self) -> float | None:
        """The share of time that threads waited for a core since the last call."""
        return self._contention.take_share() if self._contention is not None else None

    def _take_transfer_stats(self) -> TransferStats:
        """What was transferred between tiers since the last call."""
        return TransferStats() if self._queue is None else self._queue.take_stats()

    def _save(self, step: int) -> None:
        self.checkpoints.save(step, self._compute.loss_scale)

    def _interrupted(self, done: int) -> RunInterrupted:
        """Saves the last complete step, unless it is saved already."""
        # Its save may be under way. A second one at once would remove files that another rank,
        # which is done with the first, has already written for it.
        if done and not self.checkpoints.has(done):
            self.store.flush_deferred_updates(self._context.program)
            self._save(done)
        self.checkpoints.finish()
        return RunInterrupted(f"stopped after step {done}; {self.checkpoints.last_good()}")

    def _save_layer(self, index: int, path: Path) -> SavedFile | None:
        """Saves one layer, from the saver's thread."""
        saved = self.store.save_layer(index, path)
        self._count_other_work()
        return saved

    def _count_other_work(self) -> None:
        """Gives a sign of life between instructions."""
        if self._heartbeat is not None:
            self._heartbeat[2] += 1

    def where(self) -> str:
        """The step that ran last, for a message."""
        return f"in step {self._current_step}"
