"""Going on: with a run from its newest checkpoint, under its plan or another one; and with text."""

import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from windlass.api.machines import Progress
from windlass.api.model_graph import build_requested_model
from windlass.api.plan import Planned, plan
from windlass.api.runs import RUNS, load
from windlass.api.training.disk_check import require_disk_space_to_resume
from windlass.api.training.run_files import planned_from_record, replace_plan, run_metadata
from windlass.api.training.setup import (
    load_run_tokens,
    make_batches,
    make_training_loop,
    never_stop,
    prepare_tokens,
    require_local_machine,
    verified_programs,
)
from windlass.api.training.train import Run
from windlass.errors import CheckpointError, RecordError, RequestError
from windlass.models.catalog import is_causal
from windlass.program.instruction import Program
from windlass.schema import run_record as names
from windlass.schema.request import Request
from windlass.schema.run_record import Step
from windlass.tracking.load_run import RunRecord
from windlass.tracking.run_folder import RunFolder, reopen_run_folder

if TYPE_CHECKING:
    from windlass.data.token_files import TokenDataset
    from windlass.runtime.checkpoint.checkpoint import Checkpoint

_OF_THE_PLAN = ("parallel", "sharding", "batch", "recompute", "recompute_layers",
                "phases", "compile",
                "precision", "moments", "memory")  # fmt: skip
"""Parts of a request that may change in the middle of a run: how it is computed, not what."""


def resume(
    run: str | Path = "last",
    *overrides: str,
    root: Path | str = RUNS,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Goes on with a run from its newest good checkpoint, or from its start if it has none.

    Under another plan the run is the same: data, schedule, optimizer state and randomness go on,
    and only the order in which floating-point numbers are summed may differ.

    Args:
        run: folder, name, beginning of its id, or `last`.
        overrides: `key=value` of the plan, such as `parallel.data=2`; none keeps the plan.
        root: where run folders lie.
        stop: asked before each micro-batch; True saves and ends.
        progress: told how far preparations are.

    Raises:
        RecordError: no such run, it is finished, or another process holds it.
        RequestError: an override would make it another run.
        CheckpointError: every checkpoint is damaged.
        StorageError: the disk lacks room for the rest.
    """
    record = load(run, root=root)
    planned = _planned(record, overrides, progress)
    require_local_machine(planned)
    programs = verified_programs(planned)
    again = reopen_run(record, planned, progress, programs=programs if overrides else None)
    steps = make_training_loop(
        planned, make_batches(planned, again.tokens), programs, again.folder, again.checkpoint,
        stop or never_stop,
    )  # fmt: skip
    return continue_run(planned, again, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenedRun:
    """A run whose folder is held for its next attempt."""

    folder: RunFolder
    tokens: "TokenDataset"
    checkpoint: "Checkpoint | None"
    """That it goes on from, with whole layers; None begins anew."""
    notes: tuple[str, ...]
    """What a user should know before it goes on."""


def continue_run(
    planned: Planned, reopened_run: ReopenedRun, steps: Callable[[], Generator[Step]]
) -> Run:
    """The next attempt at a run.

    Args:
        planned: what it runs.
        again: its folder.
        steps: its training loop.
    """
    checkpoint, checkpoints = (
        reopened_run.checkpoint,
        reopened_run.folder.path / names.CHECKPOINT_FOLDER,
    )
    done = checkpoint.manifest.step if checkpoint else 0
    return Run(
        planned,
        reopened_run.folder,
        _tidying(steps, checkpoints),
        done=done,
        notes=reopened_run.notes,
    )


def reopen_run(
    record: RunRecord,
    planned: Planned,
    progress: Progress | None = None,
    *,
    programs: tuple[Program, ...] | None = None,
) -> ReopenedRun:
    """Takes a run's folder for its next attempt, with the newest good checkpoint in it.

    Args:
        record: of the run.
        planned: what it goes on with.
        progress: told how far preparations are.
        programs: of another plan than before; None if it is the same.

    Raises:
        RecordError: it is finished, its text has changed, or another process holds it.
        CheckpointError: every checkpoint is damaged.
        StorageError: the disk lacks room for the rest.
    """
    from windlass.runtime.checkpoint.checkpoint import (
        checkpoint_folders,
        is_sharded,
        latest_checkpoint,
    )
    from windlass.runtime.checkpoint.merge_shards import merge_shards

    checkpoints = record.folder / names.CHECKPOINT_FOLDER
    checkpoint = latest_checkpoint(checkpoints)
    done = checkpoint.manifest.step if checkpoint else 0
    if done >= planned.request.train.steps:
        raise RecordError(f"run `{record.folder.name}` has finished all its {done} steps")
    require_disk_space_to_resume(planned, record.folder, done, len(checkpoint_folders(checkpoints)))
    tokens = load_run_tokens(record.folder) or prepare_tokens(planned.request, progress)
    if tokens.fingerprint != record.meta.get("tokens"):
        raise RecordError(
            f"the text of `{planned.request.data.source}` has changed since run "
            f"`{record.folder.name}` began; it cannot go on as if nothing happened"
        )
    held = reopen_run_folder(record.folder, meta=run_metadata(planned, tokens))
    if programs:
        replace_plan(held, planned, programs)
    notes = checkpoint.damaged if checkpoint else ("no checkpoint was saved: begins anew",)
    if checkpoint and is_sharded(checkpoint.manifest):  # else no model need be built
        into = checkpoints / names.MERGED_CHECKPOINT_FOLDER
        checkpoint = merge_shards(checkpoint, build_requested_model(planned.request.model), into)
    return ReopenedRun(folder=held, tokens=tokens, checkpoint=checkpoint, notes=notes)


def _planned(record: RunRecord, overrides: tuple[str, ...], progress: Progress | None) -> Planned:
    """What a run goes on with."""
    if not overrides:
        return planned_from_record(record)
    alien = [each for each in overrides if each.partition("=")[0].split(".")[0] not in _OF_THE_PLAN]
    if alien:
        known = ", ".join(_OF_THE_PLAN)
        raise RequestError(
            f"`{alien[0]}` would make it another run; what may change in the middle is {known}"
        )
    request = Request.resolve(record.folder / names.REQUEST_FILE, overrides)
    return plan(request, progress=progress)


def _tidying(
    steps: Callable[[], Generator[Step]], checkpoints: Path
) -> Callable[[], Generator[Step]]:
    """Removes what was put together for the devices to begin with, once all have."""

    def tidy() -> Generator[Step]:
        for step in steps():
            shutil.rmtree(checkpoints / names.MERGED_CHECKPOINT_FOLDER, ignore_errors=True)
            yield step

    return tidy


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
        RequestError: its model predicts no next token.
        CheckpointError: it has no whole checkpoint.
    """
    from windlass.data.tokenizer import load_tokenizer
    from windlass.runtime.checkpoint.checkpoint import latest_checkpoint
    from windlass.runtime.checkpoint.merge_shards import merge_shards
    from windlass.runtime.generate import SamplingOptions, generate

    record = load(run, root=root)
    planned = planned_from_record(record)
    if not is_causal(planned.request.model.name):
        raise RequestError(
            f"`{planned.request.model.name}` predicts tokens that are hidden from it, not the next "
            "one, so that it writes no text; sample a run of a model that does"
        )
    checkpoint = latest_checkpoint(record.folder / names.CHECKPOINT_FOLDER)
    if checkpoint is None:
        raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
    chain = build_requested_model(planned.request.model)
    tokenizer = load_tokenizer(record.folder / names.TOKENIZER_FILE)
    with TemporaryDirectory(dir=record.folder) as folder:
        written = generate(
            chain,
            merge_shards(checkpoint, chain, Path(folder) / names.MERGED_CHECKPOINT_FOLDER),
            tokenizer.encode(prompt) or [tokenizer.end_of_text],
            SamplingOptions(
                count=tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                end_token=tokenizer.end_of_text,
            ),
        )
        yield from tokenizer.stream_decode(written)
