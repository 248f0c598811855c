"""The training loop of a run, in this process or on several ranks of this host."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.fork_server import ForkServer
from windlass.jobs import Planned, prepare_data
from windlass.program import Program, lower
from windlass.schema import CHECKPOINT_FOLDER, MEASURED_TIMELINE_FILE, Step, Timeline
from windlass.torch_ext import install_allocator
from windlass.tracking import RunFolder
from windlass.training.inputs.batches import make_batches
from windlass.training.inputs.run_data import load_run_tokens
from windlass.training.inputs.run_tasks import load_run_tasks
from windlass.training.loop.hooks import LoopHooks
from windlass.training.loop.local_ranks import train_local_ranks

if TYPE_CHECKING:
    from windlass.data import TrainingBatches
    from windlass.models import LayerStack
    from windlass.runtime import Checkpoint, MemoryLimit, StartEngine
    from windlass.torch_ext import Device

_RECORDED_STEP = 3
"""Step whose timeline is measured, counted within an attempt: caches are warm by then."""


def make_training_loop(
    planned: Planned,
    batches: "TrainingBatches",
    programs: tuple[Program, ...],
    folder: RunFolder,
    checkpoint: "Checkpoint | None",
    hooks: LoopHooks,
    server: ForkServer | None = None,
) -> Callable[[], Generator[Step]]:
    """The training loop of a run, which begins when it is called.

    Args:
        programs: one runs in this process; several run as local ranks, a process each.
        checkpoint: the checkpoint to start from; None starts from the beginning.
        server: forks the local ranks; None starts each anew.
    """
    if len(programs) == 1 and planned.machine.stack is None:
        from windlass.torch_ext import device_for

        _prepare_memory(planned)
        rank = _RankTraining(
            planned=planned, batches=batches, program=programs[0], folder=folder.path,
            device=device_for(planned.machine.device.kind), hooks=hooks,
        )  # fmt: skip
        stack = _new_stack(planned, checkpoint)
        return lambda: _training_loop(rank, stack, checkpoint)
    return lambda: train_local_ranks(
        planned,
        programs,
        folder.path,
        attempt=folder.attempt,
        checkpoint=checkpoint.path if checkpoint else None,
        hooks=hooks,
        server=server,
    )


def train_rank(
    planned: Planned,
    rank: int,
    folder: Path,
    checkpoint: Path | None,
    device: "Device",
    hooks: LoopHooks,
) -> Generator[Step]:
    """The training loop of one rank of several.

    Args:
        checkpoint: the checkpoint that all ranks start from; None starts from the beginning.
        hooks: what the caller attaches; `stop` asks all ranks to end after the current step.
    """
    from windlass.runtime import open_checkpoint

    _prepare_memory(planned)
    tokens = load_run_tokens(folder) or prepare_data(planned.request, None)
    batches, program = make_batches(planned, tokens), lower(planned.plan, planned.graph)[rank]
    start = open_checkpoint(checkpoint) if checkpoint else None
    training = _RankTraining(
        planned=planned, batches=batches, program=program, folder=folder, device=device, hooks=hooks
    )
    return _training_loop(training, _new_stack(planned, start), start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTraining:
    """What one rank trains with, whatever it starts from."""

    planned: Planned
    batches: "TrainingBatches"
    program: Program
    folder: Path
    """The run folder."""
    device: "Device"
    hooks: LoopHooks


def _new_stack(planned: Planned, checkpoint: "Checkpoint | None") -> "LayerStack":
    model, seed = planned.request.model_identity, planned.request.train.seed
    if checkpoint is None:
        return planned.objects.stack(model, seed=seed)
    return planned.objects.stack(model.saved, seed=seed, weightless=True)


def _prepare_memory(planned: Planned) -> None:
    """Limits the memory of this process to what its rank needs; precedes torch's first tensor."""
    install_allocator()
    _memory_limit(planned).apply()


def _memory_limit(planned: Planned) -> "MemoryLimit":
    from windlass.runtime import MemoryLimit

    peak = planned.prediction.peaks[0]
    return MemoryLimit(
        tensor_bytes=peak.peak_bytes - peak.by_class["runtime"],
        budget_bytes=planned.request.memory or planned.machine.device.memory.capacity_bytes,
    )


def _training_loop(
    rank: _RankTraining, stack: "LayerStack", checkpoint: "Checkpoint | None"
) -> Generator[Step]:
    """The training loop of one rank, which a verification may stop and start again."""
    instrumentation = rank.hooks.instrumentation
    after = instrumentation.restart_after if instrumentation else None
    if after is None:
        return _attempt(rank, stack, checkpoint)
    from windlass.runtime import train_with_restart

    def start(checkpoint: "Checkpoint | None", stop: Callable[[], bool]) -> Generator[Step]:
        # A new model each time: only the files may connect the two attempts.
        stopped = replace(rank, hooks=replace(rank.hooks, stop=stop))
        return _attempt(stopped, _new_stack(rank.planned, checkpoint), checkpoint)

    return train_with_restart(start, stack, rank.folder, after=after, stop=rank.hooks.stop)


def _attempt(
    rank: _RankTraining, stack: "LayerStack", checkpoint: "Checkpoint | None"
) -> Generator[Step]:
    """One attempt at a rank's training; rank 0 also saves the measured timeline of one step."""
    from windlass.runtime import RankContext, TimelineRecorder, train_loop

    planned, hooks, number = rank.planned, rank.hooks, rank.program.device
    instrumentation = hooks.instrumentation
    done = checkpoint.manifest.step if checkpoint else 0
    recorded = min(done + _RECORDED_STEP, planned.request.train.steps)

    def save_timeline(step: int, timeline: Timeline) -> None:
        del step
        timeline.save(rank.folder / MEASURED_TIMELINE_FILE)

    recorder = TimelineRecorder(steps=frozenset({recorded}), record=save_timeline)
    context = RankContext(
        plan=planned.plan,
        stack=stack,
        program=rank.program,
        settings=planned.request.train,
        checkpoints=rank.folder / CHECKPOINT_FOLDER,
        graph=planned.graph if planned.plan.parallel.devices > 1 else None,
        device=rank.device,
        memory_limit=_memory_limit(planned),
        tasks=load_run_tasks(rank.folder, stack.max_sequence),
    )
    return train_loop(
        context,
        rank.batches,
        resume=checkpoint,
        stop=hooks.stop,
        recorder=None if number else recorder,
        heartbeat=hooks.heartbeat,
        wrap_handlers=instrumentation.handler_wrapper(rank.folder, number)
        if instrumentation
        else None,
        engine=_engine(planned),
    )


def _engine(planned: Planned) -> "StartEngine":
    """What computes the steps of a plan: the engine of its stack, or the own runtime."""
    if planned.machine.stack is None:
        from windlass.runtime import RankParts

        return RankParts
    from windlass.engines.torch import TorchEngine

    return TorchEngine
