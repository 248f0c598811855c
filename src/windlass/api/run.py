"""Running: makes a run ready, trains, journals every step; goes on with a run; samples from one."""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.disk import require_disk, require_disk_again
from windlass.api.plan import HERE, Planned, Progress, chain_of_request, plan
from windlass.api.pod import abreast
from windlass.api.record import RUNS, load
from windlass.api.short import with_ways
from windlass.cost.simulate import simulate
from windlass.document import Document
from windlass.errors import (
    CheckpointError,
    MachineError,
    MemoryShort,
    PlanError,
    RecordError,
    RequestError,
    RunInterrupted,
)
from windlass.files import cache_folder
from windlass.machines.allocator import (
    KEPT_SHARE,
    give_back,
    limit_blocks,
    prepare_allocator,
)
from windlass.program.instruction import Program
from windlass.program.legal import require_legal
from windlass.program.lower import lower
from windlass.program.verify import verify
from windlass.search.choice import Choice
from windlass.spec import record as names
from windlass.spec.plan import HOST
from windlass.spec.prediction import Timeline
from windlass.spec.record import RunState, Step
from windlass.spec.request import Request
from windlass.track.environment import collect
from windlass.track.history import Record
from windlass.track.run import RunFolder, create, reopen

if TYPE_CHECKING:
    from windlass.data.batches import Batches
    from windlass.data.tokens import Tokens
    from windlass.models.chain import Chain
    from windlass.runtime.beat import Marks
    from windlass.runtime.checkpoint import Checkpoint

_WATCHED_STEP = 3
"""Counted within an attempt: late enough that caches are warm, early enough to be there soon."""


class Run:
    """A run that is ready to go; iterate over it once to get its measured steps.

    Made by `train` and `resume`. Its folder is held from the start and freed at the end.
    """

    def __init__(
        self,
        planned: Planned,
        held: RunFolder,
        steps: Callable[[], Generator[Step]],
        *,
        done: int = 0,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.planned = planned
        self.folder = held.path
        self.done = done
        """Steps that earlier attempts left behind."""
        self.notes = notes
        """What a user should know before it goes on."""
        self._held = held
        self._steps = steps
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Trains; journals and yields every step.

        Raises:
            MemoryShort: memory ran out; the message names plans that fit into what there was.
            RecordError: it was iterated over before.
            RunBroken: a loss or gradient is not finite.
            RunInterrupted: the caller's `stop` said so; the state is saved.
            StorageError: the disk is full; the last good checkpoint is kept.
        """
        if self._begun:
            raise RecordError(
                f"run `{self.folder.name}` was iterated over before; go on with `resume`"
            )
        self._begun = True
        state: RunState = "broken"
        reason = "the program failed"
        short: MemoryShort | None = None
        try:
            with closing(self._steps()) as steps:
                for step in steps:
                    self._held.append(step)
                    yield step
            state, reason = "finished", ""
        except (RunInterrupted, KeyboardInterrupt, GeneratorExit) as error:
            state, reason = "interrupted", str(error)
            raise
        except MemoryShort as error:
            # The tensors that its frames hold would leave no room for what follows.
            short, reason = error.with_traceback(None), str(error)
        except Exception as error:
            reason = str(error)
            raise
        finally:
            self._held.end(state, reason=reason)
        if short is not None:
            raise with_ways(short, self.planned, self.folder)


def train(
    what: Planned | Request | str,
    *overrides: str,
    root: Path | str = RUNS,
    folder: Path | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Makes a run ready: tokens, verified program, run folder. Iterating over it trains.

    Args:
        what: a model's name, a request, or what `plan` gave.
        overrides: `key=value`, if `what` is a name.
        root: where run folders lie.
        folder: trains into this folder in place of a new one under `root`.
        stop: asked before each micro-batch; True saves and ends.
        progress: told how far preparations are.

    Raises:
        WindlassError: what is wrong with the request, the data, the machine or the folder.
    """
    if not isinstance(what, Planned):
        planned = plan(what, *overrides, progress=progress)
    elif overrides:
        raise RequestError("what is planned takes no overrides; give them to `plan`")
    else:
        planned = what
    _require_here(planned)
    require_disk(planned, folder or Path(root))
    tokens = _tokens(planned.request, progress)
    _require_room(planned, tokens)
    batches, programs = _batches(planned, tokens), _verified(planned)
    held = create(
        Path(root),
        planned.request.model.name,
        documents=_documents(planned, programs),
        meta=_meta(planned, tokens),
        folder=folder,
    )
    tokens.tokenizer.save(held.path / names.TOKENIZER_FILE)
    return Run(planned, held, _steps(planned, batches, programs, held, None, stop or never))


def resume(
    run: str | Path = "last",
    *,
    root: Path | str = RUNS,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Goes on with a run from its newest good checkpoint, or from its start if it has none.

    Args:
        run: folder, name, beginning of its id, or `last`.
        root: where run folders lie.
        stop: asked before each micro-batch; True saves and ends.
        progress: told how far preparations are.

    Raises:
        RecordError: no such run, it is finished, or another process holds it.
        CheckpointError: every checkpoint is damaged.
        StorageError: the disk lacks room for the rest.
    """
    from windlass.runtime.checkpoint import latest, stored

    record = load(run, root=root)
    planned = planned_of(record)
    _require_here(planned)
    checkpoints = record.folder / names.CHECKPOINT_FOLDER
    checkpoint = latest(checkpoints)
    done = checkpoint.manifest.step if checkpoint else 0
    if done >= planned.request.train.steps:
        raise RecordError(f"run `{record.folder.name}` has finished all its {done} steps")
    require_disk_again(planned, record.folder, done, len(stored(checkpoints)))
    tokens = _tokens(planned.request, progress)
    if tokens.fingerprint != record.meta.get("tokens"):
        raise RecordError(
            f"the text of `{planned.request.data.source}` has changed since run "
            f"`{record.folder.name}` began; it cannot go on as if nothing happened"
        )
    batches, programs = _batches(planned, tokens), _verified(planned)
    held = reopen(record.folder, meta=_meta(planned, tokens))
    notes = checkpoint.damaged if checkpoint else ("no checkpoint was saved: begins anew",)
    steps = _steps(planned, batches, programs, held, checkpoint, stop or never)
    return Run(planned, held, steps, done=done, notes=notes)


def sample(
    run: str | Path,
    prompt: str,
    *,
    root: Path | str = RUNS,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[str]:
    """Text that a run's newest good checkpoint writes after a prompt, piece by piece.

    Raises:
        RecordError: no such run.
        CheckpointError: it has no whole checkpoint.
    """
    from windlass.data.tokenizer import load_tokenizer
    from windlass.runtime.checkpoint import latest
    from windlass.runtime.generate import generate

    record = load(run, root=root)
    planned = planned_of(record)
    checkpoint = latest(record.folder / names.CHECKPOINT_FOLDER)
    if checkpoint is None:
        raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
    tokenizer = load_tokenizer(record.folder / names.TOKENIZER_FILE)
    written = generate(
        chain_of_request(planned.request.model),
        checkpoint,
        tokenizer.encode(prompt) or [tokenizer.end_of_text],
        count=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end=tokenizer.end_of_text,
    )
    yield from tokenizer.pieces(written)


def _tokens(request: Request, progress: Progress | None) -> "Tokens":
    from windlass.data.prepare import prepare

    data = request.data
    tokens = prepare(
        data.source,
        tokenizer=data.tokenizer,
        vocabulary=data.vocabulary,
        held_out=data.held_out,
        text_field=data.text_field,
        limit_bytes=data.limit_bytes,
        cache=cache_folder() / "tokens",
        progress=progress,
    )
    give_back()
    return tokens


def _require_here(planned: Planned) -> None:
    if planned.request.machine != HERE:
        raise MachineError(
            f"machine `{planned.request.machine}` is not this one: plan and fit tell what it would "
            "do, train runs on `here`"
        )


def _require_room(planned: Planned, tokens: "Tokens") -> None:
    if tokens.vocabulary > planned.graph.vocabulary:
        raise PlanError(
            f"the tokenizer has {tokens.vocabulary} entries and the model only "
            f"{planned.graph.vocabulary}; raise `model.vocabulary` or lower `data.vocabulary`"
        )


def _verified(planned: Planned) -> tuple[Program, ...]:
    """The programs of all devices, proved.

    This is the gate of every run: a plan may come from a search, or from a file that was edited.
    """
    plan, graph, machine = planned.plan, planned.graph, planned.machine
    require_legal(plan, graph, machine, global_batch=planned.request.train.batch)
    programs = lower(plan, graph)
    tiers = machine.device.tiers
    rooms = {tier.name: tier.capacity_bytes for tier in tiers if tier.name == HOST}
    verify(programs, plan, graph, rooms | {machine.device.near.name: _left_bytes(planned)})
    return programs


def _left_bytes(planned: Planned) -> int:
    """What a process has for tensors: what it holds before any is no instruction's doing."""
    device = planned.machine.device
    near_bytes = planned.request.near or device.near.capacity_bytes
    return near_bytes - device.process_bytes(compiled=planned.plan.compile)


def batches_of(planned: Planned) -> "Batches":
    """The batches of a run, from tokens that were made before or are made now.

    Raises:
        DataError: the text is missing, empty or too short.
    """
    return _batches(planned, _tokens(planned.request, None))


def _batches(planned: Planned, tokens: "Tokens") -> "Batches":
    from windlass.data.batches import Batches

    train_request = planned.request.train
    return Batches(
        tokens,
        sequence=planned.plan.batch.sequence,
        batch=train_request.batch,
        seed=train_request.seed,
    )


def _documents(planned: Planned, programs: tuple[Program, ...]) -> dict[str, Document]:
    """The plain files of a new run."""
    timeline = simulate(planned.plan, planned.graph, planned.machine, programs)
    return {
        names.REQUEST_FILE: planned.request,
        names.PLAN_FILE: planned.plan,
        names.GRAPH_FILE: planned.graph,
        names.MACHINE_FILE: planned.machine,
        names.PREDICTION_FILE: planned.prediction,
        names.PROGRAM_FILE: programs[0],
        names.PREDICTED_TIMELINE_FILE: timeline,
        names.ENVIRONMENT_FILE: collect(sys.argv),
    }


def _meta(planned: Planned, tokens: "Tokens") -> dict[str, object]:
    """What lists and pages show of a run without reading more."""
    return {
        "model": planned.request.model.name,
        "machine": planned.machine.name,
        "steps": planned.request.train.steps,
        "predicted_seconds": planned.prediction.step_seconds,
        "unigram_entropy": tokens.meta.held_out_unigram_nats,
        "unigram_bits_per_byte": tokens.meta.held_out_unigram_bits_per_byte,
        "tokens": tokens.fingerprint,
    }


def planned_of(record: Record) -> Planned:
    """What a run was made of, from its own files."""
    parts = (record.request, record.graph, record.machine, record.plan, record.prediction)
    request, graph, machine, plan, prediction = parts
    if not (request and graph and machine and plan and prediction):
        why = "; ".join(record.faults) or "files are missing"
        raise RecordError(f"run `{record.folder.name}` cannot go on: {why}")
    choice = Choice(plan=plan, prediction=prediction)
    return Planned(request=request, graph=graph, machine=machine, choice=choice)


def never() -> bool:
    """No wish to stop."""
    return False


def _steps(
    planned: Planned,
    batches: "Batches",
    programs: tuple[Program, ...],
    held: RunFolder,
    checkpoint: "Checkpoint | None",
    stop: Callable[[], bool],
) -> Callable[[], Generator[Step]]:
    """The training loop, begun when it is called: here, or on several devices beside this."""
    folder = held.path
    if len(programs) == 1:
        _prepare(planned)
        chain = chain_of_request(planned.request.model, seed=planned.request.train.seed)
        return lambda: _trained(planned, chain, batches, programs[0], folder, checkpoint, stop)
    return lambda: abreast(
        planned,
        programs,
        folder,
        attempt=held.attempt,
        checkpoint=checkpoint.path if checkpoint else None,
        stop=stop,
    )


def device_steps(
    planned: Planned,
    device: int,
    folder: Path,
    checkpoint: Path | None,
    *,
    beat: "Marks",
    stop: Callable[[], bool],
) -> Generator[Step]:
    """The training loop of one device of several.

    Args:
        planned: what the run was made of.
        device: which of its devices.
        folder: of the run.
        checkpoint: that all go on from; None begins anew.
        beat: told the step and instruction.
        stop: True asks all devices to end with the step under way.
    """
    from windlass.runtime.checkpoint import found

    _prepare(planned)
    batches = batches_of(planned)
    chain = chain_of_request(planned.request.model, seed=planned.request.train.seed)
    program = lower(planned.plan, planned.graph)[device]
    start = found(checkpoint) if checkpoint else None
    return _trained(planned, chain, batches, program, folder, start, stop, beat)


def _prepare(planned: Planned) -> None:
    """Sets this process up to hold what its device holds; comes before torch's first tensor."""
    prepare_allocator()
    peak = planned.prediction.peaks[0]
    blocks = peak.peak_bytes - peak.by_class["runtime"] + round(KEPT_SHARE * peak.peak_bytes)
    limit_blocks(min(blocks, _left_bytes(planned)))


def _trained(
    planned: Planned,
    chain: "Chain",
    batches: "Batches",
    program: Program,
    folder: Path,
    checkpoint: "Checkpoint | None",
    stop: Callable[[], bool],
    beat: "Marks | None" = None,
) -> Generator[Step]:
    """The training loop of one device; the first keeps one step's measured timeline."""
    from windlass.runtime.train import Watch, train

    done = checkpoint.manifest.step if checkpoint else 0
    watched = min(done + _WATCHED_STEP, planned.request.train.steps)

    def keep(step: int, timeline: Timeline) -> None:
        del step
        timeline.save(folder / names.MEASURED_TIMELINE_FILE)

    return train(
        planned.plan,
        chain,
        batches,
        planned.request.train,
        program=program,
        checkpoints=folder / names.CHECKPOINT_FOLDER,
        resume=checkpoint,
        device=planned.machine.device.kind,
        stop=stop,
        watch=None if program.device else Watch(steps=frozenset({watched}), take=keep),
        graph=planned.graph if planned.plan.cut.devices > 1 else None,
        beat=beat,
    )
