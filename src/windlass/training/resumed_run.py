"""`resume` continues a run from its newest checkpoint."""

import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import CheckpointError, RecordError, RequestError, RunFinished
from windlass.jobs import (
    NO_OBJECTS,
    RUNS,
    Planned,
    PlannedObjects,
    Progress,
    load,
    plan_request,
    prepare_data,
)
from windlass.program import Program
from windlass.schema import (
    CHECKPOINT_FOLDER,
    ENVIRONMENT_FILE,
    JOURNAL_FOLDER,
    PROGRAM_FILE,
    REQUEST_FILE,
    TOKENIZER_FILE,
    Request,
    Step,
)
from windlass.stop_signals import end_until_asked
from windlass.tracking import RunFolder, RunRecord, collect_environment, reopen_run_folder
from windlass.training.disk_check import require_disk_space_to_resume
from windlass.training.inputs.batches import make_batches, with_skipped_batches
from windlass.training.inputs.run_data import (
    load_run_tokens,
    requested_text_fingerprint,
    with_saved_config,
)
from windlass.training.legs import request_at_step, start_of_leg
from windlass.training.loop.hooks import LoopHooks, never_stop
from windlass.training.loop.local_ranks import rank_server
from windlass.training.loop.training_loop import make_training_loop
from windlass.training.parent import remove_merged_checkpoint
from windlass.training.preconditions import require_local_machine, verified_programs
from windlass.training.run import Run
from windlass.training.run_files import (
    input_documents,
    planned_from_record,
    record_inputs,
    refuse_other_runs,
    replace_plan,
    require_unchanged,
    restore_replaced_plan,
    run_metadata,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from windlass.data import ExampleDataset, TokenDataset
    from windlass.runtime import Checkpoint

_CHANGEABLE = (
    "parallel", "sharding", "batch", "recompute", "recompute_layers", "phases", "compile",
    "precision", "moments", "memory", "deterministic", "step_graph", "stack",
)  # fmt: skip
"""Parts of a request that may change between attempts: how a run is computed, not what it is."""


def resume(
    run: str | Path = "last",
    *overrides: str,
    skip_batches: Sequence[str] = (),
    root: Path | str = RUNS,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    loss: "Callable[[Tensor, Tensor], Tensor] | None" = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Continues a run from its newest good checkpoint, or from the beginning if it has none.

    Under another plan the run stays the same: data order, learning-rate schedule, optimizer state
    and randomness continue; only the order in which floating-point numbers are summed may differ.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        overrides: `key=value` of the plan, such as `parallel.data=2`; without any, the plan stays.
        skip_batches: batches that are left out from now on, such as `120-125`; later ones move up.
        root: the folder that holds the run folders.
        model: the model of a run that was given it as an object; its weights are the run's.
        loss: the loss of a run that was given one.
        stop: polled before each micro-batch; True saves and ends.
        progress: called with how far preparations are.

    Raises:
        RunFinished: it has no step left.
        RecordError: no such run, one of its files has changed, or another process holds its folder.
        RequestError: an override would make it another run, or a batch that should be left out was
            taken already.
        CheckpointError: every checkpoint is damaged.
        StorageError: the disk lacks space for the rest of the run.
    """
    end_until_asked(stop)
    record = load(run, root=root)
    refuse_other_runs(record)
    if restore_replaced_plan(record):
        record = load(record.folder)
    objects = objects_of_record(record, model=model, loss=loss)
    planned, is_new = _planned(record, overrides, objects, progress)
    if skip_batches:
        planned, is_new = with_skipped_batches(planned, record, skip_batches), True
    require_local_machine(planned)
    server = rank_server(planned, planned.plan.parallel.devices)
    programs = verified_programs(planned)
    reopened = reopen_run(record, planned, progress, programs=programs if is_new else None)
    batches, hooks = make_batches(planned, reopened.tokens), LoopHooks(stop=stop or never_stop)
    steps = make_training_loop(
        planned, batches, programs, reopened.folder, reopened.checkpoint, hooks, server
    )
    resumed = continue_run(planned, reopened, steps)
    resumed.next_leg = lambda: resume(resumed.folder, model=model, loss=loss, stop=stop)
    return resumed


def replan(record: RunRecord, *overrides: str) -> Planned:
    """Gives a run another plan from its next attempt on, which others start."""
    planned, _ = _planned(record, overrides, NO_OBJECTS, None)
    reopened = reopen_run(record, planned, programs=verified_programs(planned))
    with reopened.folder as folder:
        folder.append_event("end", state="prepared", reason="")
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenedRun:
    """A run whose folder is locked for its next attempt."""

    folder: RunFolder
    tokens: "TokenDataset | ExampleDataset"
    checkpoint: "Checkpoint | None"
    """The checkpoint to start from, shards merged; None starts from the beginning."""
    notes: tuple[str, ...]
    """What a user should know before the run continues, a sentence each."""


def continue_run(
    planned: Planned, reopened: ReopenedRun, steps: Callable[[], Generator[Step]]
) -> Run:
    """The next attempt at a run."""
    checkpoint, folder = reopened.checkpoint, reopened.folder
    done = checkpoint.manifest.step if checkpoint else 0
    steps = remove_merged_checkpoint(steps, folder.path)
    return Run(planned, folder, steps, done=done, notes=reopened.notes)


def reopen_run(
    record: RunRecord,
    planned: Planned,
    progress: Progress | None = None,
    *,
    programs: tuple[Program, ...] | None = None,
) -> ReopenedRun:
    """Locks a run's folder for its next attempt, and finds its newest good checkpoint.

    Args:
        programs: the programs of a new plan; None if the plan stays.

    Raises:
        RunFinished: it has no step left.
        RecordError: its text has changed, or another process holds it.
        CheckpointError: every checkpoint is damaged.
        StorageError: the disk lacks space for the rest of the run.
    """
    from windlass.runtime import checkpoint_folders, latest_checkpoint

    checkpoints = record.folder / CHECKPOINT_FOLDER
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is None and "parent" in record.meta:
        raise CheckpointError(
            f"run `{record.folder.name}` started from another run, whose checkpoint it has lost; "
            "start it again with `windlass train --from`"
        )
    done = checkpoint.manifest.step if checkpoint else 0
    require_steps_left(record, planned, done)
    require_disk_space_to_resume(planned, record.folder, done, len(checkpoint_folders(checkpoints)))
    tokens = load_run_tokens(record.folder) or prepare_data(planned.request, progress)
    require_tokens_of_run(record, planned, tokens)
    folder = reopen_run_folder(record.folder, meta=run_metadata(planned, tokens))
    if programs:
        replace_plan(folder, planned, programs)
    record_inputs(folder, input_documents(planned, tokens))
    notes = checkpoint.damaged if checkpoint else ("no checkpoint was saved; starts again",)
    notes = (*planned.notes, *notes, *_record_behind(record, done), *record.faults)
    if checkpoint:
        checkpoint = start_of_leg(checkpoint, planned, record.folder)
    return ReopenedRun(folder=folder, tokens=tokens, checkpoint=checkpoint, notes=notes)


def require_steps_left(record: RunRecord, planned: Planned, done: int) -> None:
    """Refuses a run all of whose steps are done, and sees that its record says so.

    Raises:
        RunFinished: all steps are done.
    """
    if done < planned.request.train.steps:
        return
    if record.state not in ("finished", "running"):
        # It was killed between its last checkpoint and its last word.
        with suppress(RecordError), reopen_run_folder(record.folder, meta={}) as folder:
            losses = [step.held_out_loss for step in record.steps if step.held_out_loss is not None]
            folder.append_event(
                "end", state="finished", reason="", held_out_loss=losses[-1] if losses else None
            )
    raise RunFinished(
        f"run `{record.folder.name}` has finished all its {done} steps; `windlass train --from "
        f"{shlex.quote(str(record.folder))} --continue train.steps={2 * done}` goes on as a new run"
    )


def _record_behind(record: RunRecord, done: int) -> Iterator[str]:
    """Says that steps before the newest checkpoint are on no record, whose journal was cut."""
    parent = record.meta.get("parent")
    continued = isinstance(parent, dict) and parent.get("continues")
    last = record.steps[-1].step if record.steps else 0
    last = max(last, parent["step"]) if continued and isinstance(parent, dict) else last
    if last < done:
        yield (
            f"the newest checkpoint is of step {done} and the record ends with step {last}, so "
            f"that `{JOURNAL_FOLDER}` was cut; only the measurements of {done - last} steps are "
            "lost, not the training that they did"
        )


def require_tokens_of_run(
    record: RunRecord, planned: Planned, tokens: "TokenDataset | ExampleDataset"
) -> None:
    """Refuses tokens other than those that a run began with.

    Raises:
        RecordError: the text has changed, or is tokenized in another way.
    """
    recorded, run = record.meta.get("tokens"), f"run `{record.folder.name}`"
    if tokens.fingerprint == recorded:
        return
    if recorded is None:
        raise RecordError(
            f"the journal of {run} has lost which text it is trained on, so that it cannot "
            f"continue; restore `{JOURNAL_FOLDER}`, or start a new run with `windlass train --from "
            f"{shlex.quote(str(record.folder))}`"
        )
    source = planned.request.data.source
    if record.meta.get("text") == requested_text_fingerprint(planned.request):
        raise RecordError(
            f"the text of `{source}` is the same as when {run} started, and gives other tokens "
            f"now{_other_versions(record)}; resume it with the versions that started it, or start "
            "a new run"
        )
    raise RecordError(
        f"the text of `{source}` has changed since {run} started, so that the run cannot continue; "
        "restore it, or start a new run"
    )


def _other_versions(record: RunRecord) -> str:
    """The versions of the tokenizing packages if they have changed, as a clause of a message."""
    recorded, now = record.environment, collect_environment(())
    if recorded is None:
        return ""
    before = {"windlass": recorded.windlass, "tokenizers": recorded.packages.get("tokenizers")}
    after = {"windlass": now.windlass, "tokenizers": now.packages.get("tokenizers")}
    changed = [
        f"{name} {before[name]} is now {after[name]}"
        for name in before
        if before[name] != after[name]
    ]
    return f" ({' and '.join(changed)})" if changed else ""


def objects_of_record(record: RunRecord, **given: Any) -> PlannedObjects:  # noqa: ANN401  of two types
    """The objects that a run was given, given again.

    Args:
        given: those of `model` and `loss` that are needed now, or None.

    Raises:
        RecordError: the run needs some that are not given, or the other way round.
    """
    names, run = record.meta.get("objects") or (), f"run `{record.folder.name}`"
    for name, value in given.items():
        needed = isinstance(names, list) and name in names
        if needed and value is None:
            raise RecordError(
                f"{run} was given its {name} as an object, which no file holds; give it again from "
                f"Python, as `windlass.resume({str(record.folder)!r}, {name}=...)`"
            )
        if value is not None and not needed:
            raise RecordError(f"{run} was given no {name} as an object; leave `{name}` out")
    return PlannedObjects(**given)


def _planned(
    record: RunRecord,
    overrides: tuple[str, ...],
    objects: PlannedObjects,
    progress: Progress | None,
) -> tuple[Planned, bool]:
    """What the next attempt runs, and whether under a new plan.

    The plan is new if there are overrides, or if the next step is in another leg of the run.
    """
    if not overrides:
        require_unchanged(record, PROGRAM_FILE, ENVIRONMENT_FILE, TOKENIZER_FILE)
        planned = replace(planned_from_record(record), objects=objects)
        of_leg = request_at_step(planned.request, _next_step(record, planned.request))
        is_new = of_leg != planned.request
        return (plan_request(of_leg, objects, progress) if is_new else planned), is_new
    fixed = [each for each in overrides if each.partition("=")[0].split(".")[0] not in _CHANGEABLE]
    if fixed:
        raise RequestError(
            f"`{fixed[0]}` would make it another run, which `windlass train --from "
            f"{shlex.quote(str(record.folder))} --continue {shlex.join(overrides)}` starts; a run "
            f"itself may change {', '.join(_CHANGEABLE)}"
        )
    require_unchanged(record, REQUEST_FILE, TOKENIZER_FILE)
    request = Request.resolve(record.folder / REQUEST_FILE, overrides)
    request = with_saved_config(request, record.folder)
    request = request_at_step(request, _next_step(record, request))
    named = {each.partition("=")[0] for each in overrides}
    freed = {key: why for key, why in _stale_pins(request).items() if key not in named}
    planned = plan_request(_without(request, freed), objects, progress)
    notes = (f"{why}, and is left open now" for why in freed.values())
    return replace(planned, notes=(*planned.notes, *notes)), True


def _stale_pins(request: Request) -> dict[str, str]:
    """Keys of a run that do not go with other degrees than those it had, each with why."""
    parallel, sharding, batch = request.parallel, request.sharding, request.batch
    data, pipeline = parallel.data or 1, parallel.pipeline or 1
    stale: dict[str, str] = {}

    def check(key: str, value: object, dependence: str, *, holds: bool) -> None:
        if value is not None and not holds:
            stale[key] = f"`{key}` = {value} of the run does not go with {dependence}"

    replicas, stages = f"`parallel.data` = {data}", f"`parallel.pipeline` = {pipeline}"
    for name in ("parameters", "optimizer"):
        degree = getattr(sharding, name)
        check(f"sharding.{name}", degree, replicas, holds=data % (degree or 1) == 0)
    check("sharding.reshard", sharding.reshard, replicas, holds=data > 1)
    check("parallel.expert", parallel.expert, replicas, holds=data % (parallel.expert or 1) == 0)
    check("parallel.schedule", parallel.schedule, stages, holds=pipeline > 1)
    check("parallel.virtual_stages", parallel.virtual_stages, stages, holds=pipeline > 1)
    layers = request.recompute_layers
    by_stage = len(layers) if isinstance(layers, tuple) else pipeline
    check("recompute_layers", layers, stages, holds=by_stage == pipeline)
    samples = data * (batch.micro or 1) * (batch.accumulation or 1)
    divides = (request.train.batch or samples) % samples == 0
    check("batch.micro", batch.micro, replicas, holds=divides)
    check("batch.accumulation", batch.accumulation, replicas, holds=divides)
    is_streamed = (request.phases or 1) > 1
    phases = f"`phases` = {request.phases}"
    check("offload.optimizer", request.offload.optimizer, phases, holds=not is_streamed)
    return stale


def _without(request: Request, keys: Iterable[str]) -> Request:
    """The request with some keys left open."""
    for key in keys:
        table, dot, name = key.rpartition(".")
        if dot:
            inner = getattr(request, table).model_copy(update={name: None})
            request = request.model_copy(update={table: inner})
        else:
            request = request.model_copy(update={name: None})
    return request


def _next_step(record: RunRecord, request: Request) -> int:
    """The step after the newest good checkpoint, which is looked for if legs depend on it."""
    from windlass.runtime import latest_checkpoint

    if request.sparsity is None or request.sparsity.legs == 1:
        return 1
    checkpoint = latest_checkpoint(record.folder / CHECKPOINT_FOLDER)
    return checkpoint.manifest.step + 1 if checkpoint else 1
