"""The training loop: a generator of measured steps."""

import gc
import time
from collections.abc import Callable, Generator
from functools import partial

from windlass.data import TrainingBatches
from windlass.errors import OutOfMemory, PlanError, RunBroken, RunInterrupted
from windlass.hardware import CpuContention, core_count
from windlass.runtime.checkpoint.checkpoint import (
    Checkpoint,
    checkpoint_name,
    remove_temporaries,
)
from windlass.runtime.compute import StopRequested
from windlass.runtime.engine import RankEngine, StartEngine, TimelineRecorder
from windlass.runtime.interpreter import HeartbeatSlots
from windlass.runtime.memory_stats import (
    PeakMemory,
    is_out_of_memory,
    requested_bytes_clause,
    usable_bytes,
)
from windlass.runtime.offload.transfer_queue import TransferStats
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.rank_context import RankContext
from windlass.runtime.rank_parts import RankParts
from windlass.runtime.verify.handler_hooks import HandlerWrapper
from windlass.schema import Step
from windlass.sparsity import last_step_of_leg
from windlass.torch_ext import (
    install_allocator,
    missing_deterministic_kernel,
    numerics,
)

_EXPERT_RECORDS = 100
"""Steps of a run whose load of experts is recorded: a model has thousands of experts."""


def never_stop() -> bool:
    """Returns False: nobody asks to stop."""
    return False


def train_loop(
    context: RankContext,
    batches: TrainingBatches,
    *,
    resume: Checkpoint | None = None,
    stop: Callable[[], bool] = never_stop,
    recorder: TimelineRecorder | None = None,
    heartbeat: HeartbeatSlots | None = None,
    wrap_handlers: HandlerWrapper | None = None,
    engine: StartEngine = RankParts,
) -> Generator[Step]:
    """Trains, and yields each step once it is done.

    The first step is 1, or the one after `resume`; the last is `settings.steps`, or the last one
    of the leg whose layers the plan has, after which a checkpoint is on the disk. The yielded steps
    and the weights are bit-identical however often the run was stopped or killed and resumed.

    Args:
        context: what this rank runs. With a graph, this process is one of several ranks, has
            initialized torch.distributed, and yields the same steps as all others do.
        stop: asked before each micro-batch; True saves the last complete step and ends.
        engine: what computes the steps, made from all of this; by default the own runtime.

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
            parts = partial(engine, context, batches, stop, heartbeat, wrap_handlers)
            run = _Run(context, stop, parts)
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
        self, context: RankContext, stop: Callable[[], bool], start: Callable[[], RankEngine]
    ) -> None:
        install_allocator()
        context.device.activate()
        self._peak = PeakMemory(context.device)
        # Ranks that share cores wait for each other, which says nothing of other processes.
        has_cores = context.plan.parallel.devices <= core_count()
        self._contention = CpuContention() if has_cores else None
        self._context, self._settings, self._stop = context, context.settings, stop
        self._current_step, self._cpu_seconds = 1, 0.0
        self._last_step = last_step_of_leg(context.sparsity, context.settings.steps)
        self._parts = start()
        self.checkpoints = self._parts.checkpoints

    def close(self) -> None:
        """Waits for the save under way, and ends all threads."""
        self._parts.close()
        if self._contention is not None:
            self._contention.close()

    def steps(
        self, resume: Checkpoint | None, recorder: TimelineRecorder | None
    ) -> Generator[Step]:
        """Runs and yields all steps after those of `resume`."""
        done = self._initialize(resume)
        self._warm_up(done)
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
                    f"--skip-batches {self._parts.batch}` leaves this batch out"
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
            elif self._parts.outcome.should_stop:
                raise self._interrupted(step)

    def _warm_up(self, done: int) -> None:
        """Compiles what can be before the step after `done`."""
        if done >= self._last_step:
            return
        try:
            self._parts.warm_up(done + 1)
        except StopRequested:
            raise self._interrupted(done) from None
        except Exception:
            # A signal to all processes ends the compiler, too.
            if self._stop():
                raise self._interrupted(done) from None
            raise

    def _initialize(self, resume: Checkpoint | None) -> int:
        """Loads what a run resumes from, or makes the state of a new one; returns the step done."""
        if not self._parts.dist.rank:
            remove_temporaries(self._context.checkpoints)
        done = self.checkpoints.step_of(resume) if resume else 0
        self._parts.initialize(resume)
        return done

    def _run_step(self, step: int, recorder: TimelineRecorder | None) -> None:
        """Runs one step, and records its timeline if the recorder asks for it."""
        self._current_step = step
        if self._parts.heartbeat is not None:
            self._parts.heartbeat[0] = step
        cpu_start = time.process_time()
        self._parts.run_step(step, recorder, self._peak.sample)
        self._cpu_seconds = time.process_time() - cpu_start
        if self._context.memory_limit is not None:
            self._context.memory_limit.apply()

    def _measured(self, step: int, *, saves: bool) -> Step:
        """The record of the step that just ran; evaluates where due."""
        plan, parts, outcome = self._context.plan, self._parts, self._parts.outcome
        evaluates = parts.evaluations.is_due(step)
        contention = self._take_contention()
        flush_start = time.perf_counter()
        if evaluates or saves:
            parts.flush_updates()
        flush_seconds = time.perf_counter() - flush_start
        transfers = self._take_transfer_stats()
        evaluation = parts.evaluations.after(step)
        if evaluates:
            self._take_transfer_stats()
            self._take_contention()
        peak = self._peak.overall_bytes()
        takes_examples = self._context.stack.examples is not None
        return Step(
            step=step,
            loss=outcome.loss,
            gradient_norm=outcome.gradient_norm,
            loss_scale=None if outcome.loss_scale is None else outcome.loss_scale.scale,
            learning_rate=learning_rate(self._settings, step),
            tokens=plan.global_batch if takes_examples else plan.tokens_per_step,
            seconds=parts.step_seconds(),
            memory_bytes=round(parts.dist.all_reduce_max(peak)),
            device_memory_bytes=peak if parts.dist.world_size > 1 else None,
            read_bytes=transfers.read_bytes,
            written_bytes=transfers.written_bytes,
            contention=contention,
            flush_seconds=flush_seconds if plan.offloads and (evaluates or saves) else 0.0,
            by_kind=parts.seconds_by_kind(),
            arrivals=parts.arrivals_by_kind(),
            cpu_seconds=self._cpu_seconds,
            held_out_loss=evaluation.loss,
            held_out_bits_per_byte=evaluation.bits_per_byte,
            held_out_loss_ema=evaluation.loss_ema,
            held_out_accuracy=evaluation.accuracy,
            held_out_sentence_loss=evaluation.sentence_loss,
            task_scores=evaluation.task_scores,
            expert_load=dict(parts.experts.totals) if self._records_experts(step) else {},
            dropped_share=parts.experts.dropped_share,
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
        return self._parts.take_transfers()

    def _save(self, step: int) -> None:
        self.checkpoints.save(step, self._parts.outcome.loss_scale)

    def _interrupted(self, done: int) -> RunInterrupted:
        """Saves the last complete step, unless it is saved already."""
        # Its save may be under way. A second one at once would remove files that another rank,
        # which is done with the first, has already written for it.
        if done and not self.checkpoints.has(done):
            self._parts.flush_updates()
            self._save(done)
        self.checkpoints.finish()
        return RunInterrupted(f"stopped after step {done}; {self.checkpoints.last_good()}")

    def where(self) -> str:
        """The step that ran last, for a message."""
        return f"in step {self._current_step}"
