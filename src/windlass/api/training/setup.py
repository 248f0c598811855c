"""The loop: what stands between a planned run and its first step, here or on several devices."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import HERE, Progress
from windlass.api.model_graph import build_requested_model
from windlass.api.plan import Planned
from windlass.api.training.instrumentation import Instrumentation
from windlass.api.training.local_launch import train_local_ranks
from windlass.atomic_files import cache_folder
from windlass.errors import MachineError, PlanError
from windlass.models.catalog import is_causal
from windlass.program.instruction import Program
from windlass.program.lowering.lower import lower
from windlass.program.validate_plan import require_valid_plan
from windlass.program.verify.verify import verify_programs
from windlass.schema import run_record as names
from windlass.schema.plan import HOST_TIER
from windlass.schema.prediction import Timeline
from windlass.schema.request import Request
from windlass.schema.run_record import Step
from windlass.torch_ext.cpu_allocator import (
    FREE_MEMORY_FRACTION,
    install_allocator,
    set_memory_limit,
    trim_heap,
)
from windlass.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from windlass.data.batches import Batches
    from windlass.data.token_files import TokenDataset
    from windlass.models.layer_stack import LayerStack
    from windlass.runtime.checkpoint.checkpoint import Checkpoint
    from windlass.runtime.distributed.heartbeat import HeartbeatSlots

_WATCHED_STEP = 3
"""Counted within an attempt: late enough that caches are warm, early enough to be there soon."""


def prepare_tokens(request: Request, progress: Progress | None) -> "TokenDataset":
    """The tokens of a request's text, made before or now.

    Raises:
        DataError: the text is missing, empty or too short.
    """
    from windlass.data.dataset_cache import prepare_dataset

    data = request.data
    tokens = prepare_dataset(
        data.source,
        tokenizer=data.tokenizer,
        vocabulary=data.vocabulary,
        held_out=data.held_out,
        text_field=data.text_field,
        limit_bytes=data.limit_bytes,
        cache=cache_folder() / "tokens",
        progress=progress,
    )
    trim_heap()
    return tokens


def load_run_tokens(folder: Path) -> "TokenDataset | None":
    """The tokens that a run has in its own folder; None if it has none there."""
    from windlass.data.token_files import open_dataset

    return open_dataset(folder / names.TOKENS_FOLDER)


def require_vocabulary(planned: Planned, tokens: "TokenDataset") -> None:
    """Refuses a model whose vocabulary is smaller than the tokenizer's.

    A model that predicts hidden tokens needs one entry more, which stands for them.

    Raises:
        PlanError: it is.
    """
    more = 0 if is_causal(planned.request.model.name) else 1
    if tokens.vocabulary + more > planned.graph.vocabulary:
        hidden = " and one that stands for hidden tokens" if more else ""
        raise PlanError(
            f"the tokenizer has {tokens.vocabulary} entries{hidden} and the model only "
            f"{planned.graph.vocabulary}; raise `model.vocabulary` or lower `data.vocabulary`"
        )


def require_local_machine(planned: Planned) -> None:
    """Refuses what is planned for another machine.

    Raises:
        MachineError: it is.
    """
    if planned.request.machine != HERE:
        raise MachineError(
            f"machine `{planned.request.machine}` is not this one: plan and fit tell what it would "
            "do, train runs on `here`; `windlass launch` prepares a run for it"
        )


def verified_programs(planned: Planned) -> tuple[Program, ...]:
    """The programs of all devices, proved.

    This is the gate of every run: a plan may come from a search, or from a file that was edited.

    Raises:
        Faults: all that is not legal.
        PlanError: a program that cannot be proved.
    """
    plan, graph, machine = planned.plan, planned.graph, planned.machine
    require_valid_plan(plan, graph, machine, global_batch=planned.request.train.batch)
    programs = lower(plan, graph)
    tiers = machine.device.tiers
    rooms = {tier.name: tier.capacity_bytes for tier in tiers if tier.name == HOST_TIER}
    verify_programs(
        programs, plan, graph, rooms | {machine.device.memory.name: _left_bytes(planned)}
    )
    return programs


def _left_bytes(planned: Planned) -> int:
    """What a process has for tensors: what it holds before any is no instruction's doing."""
    device = planned.machine.device
    near_bytes = planned.request.memory or device.memory.capacity_bytes
    return near_bytes - device.process_bytes(compiled=planned.plan.compile)


def prepare_batches(planned: Planned) -> "Batches":
    """The batches of a run, from tokens that were made before or are made now.

    Raises:
        DataError: the text is missing, empty or too short.
    """
    return make_batches(planned, prepare_tokens(planned.request, None))


def make_batches(planned: Planned, tokens: "TokenDataset") -> "Batches":
    """The batches of a run.

    Raises:
        DataError: the text is too short.
    """
    from windlass.data.batches import Batches
    from windlass.data.mlm_masking import MlmMasking
    from windlass.models.loss import IGNORE_INDEX

    train_request, masking = planned.request.train, None
    if not is_causal(planned.request.model.name):
        masking = MlmMasking(
            mask_token=planned.graph.vocabulary - 1, vocabulary=tokens.vocabulary, ignore_index=IGNORE_INDEX
        )
    return Batches(
        tokens,
        sequence=planned.plan.batch.sequence,
        batch=train_request.batch,
        seed=train_request.seed,
        masking=masking,
    )


def never_stop() -> bool:
    """No wish to stop."""
    return False


def make_training_loop(
    planned: Planned,
    found: "Batches",
    programs: tuple[Program, ...],
    held: RunFolder,
    checkpoint: "Checkpoint | None",
    stop: Callable[[], bool],
    instrumentation: Instrumentation | None = None,
) -> Callable[[], Generator[Step]]:
    """The training loop, begun when it is called: here, or on several devices beside this."""
    folder = held.path
    if len(programs) == 1:
        _prepare(planned)
        chain = build_requested_model(planned.request.model, seed=planned.request.train.seed)
        return lambda: _trained(
            planned, chain, found, programs[0], folder, checkpoint, stop, scrutiny=instrumentation
        )
    return lambda: train_local_ranks(
        planned,
        programs,
        folder,
        attempt=held.attempt,
        checkpoint=checkpoint.path if checkpoint else None,
        stop=stop,
        instrumentation=instrumentation,
    )


def train_rank(
    planned: Planned,
    device: int,
    folder: Path,
    checkpoint: Path | None,
    *,
    beat: "HeartbeatSlots",
    stop: Callable[[], bool],
    instrumentation: Instrumentation | None = None,
) -> Generator[Step]:
    """The training loop of one device of several.

    Args:
        planned: what the run was made of.
        device: which of its devices.
        folder: of the run.
        checkpoint: that all go on from; None begins anew.
        beat: told the step and instruction.
        stop: True asks all devices to end with the step under way.
        scrutiny: of a proof.
    """
    from windlass.runtime.checkpoint.checkpoint import open_checkpoint

    _prepare(planned)
    own = make_batches(planned, load_run_tokens(folder) or prepare_tokens(planned.request, None))
    chain = build_requested_model(planned.request.model, seed=planned.request.train.seed)
    program = lower(planned.plan, planned.graph)[device]
    start = open_checkpoint(checkpoint) if checkpoint else None
    return _trained(planned, chain, own, program, folder, start, stop, beat, instrumentation)


def _prepare(planned: Planned) -> None:
    """Sets this process up to hold what its device holds; comes before torch's first tensor."""
    install_allocator()
    peak = planned.prediction.peaks[0]
    blocks = (
        peak.peak_bytes - peak.by_class["runtime"] + round(FREE_MEMORY_FRACTION * peak.peak_bytes)
    )
    set_memory_limit(min(blocks, _left_bytes(planned)))


def _trained(
    planned: Planned,
    chain: "LayerStack",
    found: "Batches",
    program: Program,
    folder: Path,
    checkpoint: "Checkpoint | None",
    stop: Callable[[], bool],
    beat: "HeartbeatSlots | None" = None,
    scrutiny: Instrumentation | None = None,
) -> Generator[Step]:
    """The training loop of one device; the first keeps one step's measured timeline."""
    import torch

    from windlass.runtime.rank_context import RankContext
    from windlass.runtime.train import TimelineRecorder, train

    done = checkpoint.manifest.step if checkpoint else 0
    watched = min(done + _WATCHED_STEP, planned.request.train.steps)

    def keep(step: int, timeline: Timeline) -> None:
        del step
        timeline.save(folder / names.MEASURED_TIMELINE_FILE)

    context = RankContext(
        plan=planned.plan,
        stack=chain,
        program=program,
        settings=planned.request.train,
        checkpoints=folder / names.CHECKPOINT_FOLDER,
        graph=planned.graph if planned.plan.parallel.devices > 1 else None,
        device=torch.device(planned.machine.device.kind),
    )
    return train(
        context,
        found,
        resume=checkpoint,
        stop=stop,
        recorder=None if program.device else TimelineRecorder(steps=frozenset({watched}), record=keep),
        heartbeat=beat,
        wrap_handlers=scrutiny.handler_wrapper(folder, program.device) if scrutiny else None,
    )
