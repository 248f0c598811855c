"""`resume` continues a run from its newest checkpoint; `sample` generates text from it."""

import shlex
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
from windlass.api.training.instrumentation import LoopHooks, never_stop
from windlass.api.training.parent import remove_merged_checkpoint, with_whole_layers
from windlass.api.training.run_files import (
    planned_from_record,
    replace_plan,
    require_unchanged,
    restore_replaced_plan,
    run_metadata,
)
from windlass.api.training.setup import (
    load_run_tokens,
    make_batches,
    make_training_loop,
    prepare_tokens,
    requested_text_fingerprint,
    require_local_machine,
    verified_programs,
)
from windlass.api.training.train import Run
from windlass.errors import CheckpointError, RecordError, RequestError
from windlass.models import is_causal
from windlass.program import Program
from windlass.schema import (
    CHECKPOINT_FOLDER,
    JOURNAL_FOLDER,
    MERGED_CHECKPOINT_FOLDER,
    REQUEST_FILE,
    TOKENIZER_FILE,
    Request,
    Step,
)
from windlass.tracking import RunFolder, RunRecord, collect_environment, reopen_run_folder

if TYPE_CHECKING:
    from windlass.data import TokenDataset
    from windlass.runtime import Checkpoint

_CHANGEABLE = (
    "parallel", "sharding", "batch", "recompute", "recompute_layers", "phases", "compile",
    "precision", "moments", "memory",
)  # fmt: skip
"""Parts of a request that may change between attempts: how a run is computed, not what it is."""


def resume(
    run: str | Path = "last",
    *overrides: str,
    root: Path | str = RUNS,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Continues a run from its newest good checkpoint, or from the beginning if it has none.

    Under another plan the run stays the same: data order, learning-rate schedule, optimizer state
    and randomness continue; only the order in which floating-point numbers are summed may differ.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        overrides: `key=value` of the plan, such as `parallel.data=2`; without any, the plan stays.
        root: the folder that holds the run folders.
        stop: polled before each micro-batch; True saves and ends.
        progress: called with how far preparations are.

    Raises:
        RecordError: no such run, it has finished, one of its files has changed, or another process
            holds its folder.
        RequestError: an override would make it another run.
        CheckpointError: every checkpoint is damaged.
        StorageError: the disk lacks space for the rest of the run.
    """
    record = load(run, root=root)
    if restore_replaced_plan(record):
        record = load(record.folder)
    planned = _planned(record, overrides, progress)
    require_local_machine(planned)
    programs = verified_programs(planned)
    reopened = reopen_run(record, planned, progress, programs=programs if overrides else None)
    batches, hooks = make_batches(planned, reopened.tokens), LoopHooks(stop=stop or never_stop)
    steps = make_training_loop(
        planned, batches, programs, reopened.folder, reopened.checkpoint, hooks
    )
    return continue_run(planned, reopened, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenedRun:
    """A run whose folder is locked for its next attempt."""

    folder: RunFolder
    tokens: "TokenDataset"
    checkpoint: "Checkpoint | None"
    """The checkpoint to start from, shards merged; None starts from the beginning."""
    notes: tuple[str, ...]
    """What a user should know before the run continues, a sentence each."""


def continue_run(
    planned: Planned, reopened: ReopenedRun, steps: Callable[[], Generator[Step]]
) -> Run:
    """The next attempt at a run.

    Args:
        planned: what is run.
        reopened: its folder and the checkpoint to start from.
        steps: starts its training loop.
    """
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
        record: the run so far.
        planned: what the next attempt runs.
        progress: called with how far preparations are.
        programs: the programs of a new plan; None if the plan stays.

    Raises:
        RecordError: the run has finished, its text has changed, or another process holds it.
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
    if done >= planned.request.train.steps:
        raise RecordError(
            f"run `{record.folder.name}` has finished all its {done} steps; `windlass train --from "
            f"{shlex.quote(str(record.folder))} --continue train.steps={2 * done}` goes on as a "
            "new run"
        )
    require_disk_space_to_resume(planned, record.folder, done, len(checkpoint_folders(checkpoints)))
    tokens = load_run_tokens(record.folder) or prepare_tokens(planned.request, progress)
    require_tokens_of_run(record, planned, tokens)
    folder = reopen_run_folder(record.folder, meta=run_metadata(planned, tokens))
    if programs:
        replace_plan(folder, planned, programs)
    notes = checkpoint.damaged if checkpoint else ("no checkpoint was saved; starts again",)
    notes += record.faults
    if checkpoint:
        checkpoint = with_whole_layers(checkpoint, planned, record.folder)
    return ReopenedRun(folder=folder, tokens=tokens, checkpoint=checkpoint, notes=notes)


def require_tokens_of_run(record: RunRecord, planned: Planned, tokens: "TokenDataset") -> None:
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


def _planned(record: RunRecord, overrides: tuple[str, ...], progress: Progress | None) -> Planned:
    """What the next attempt runs: the same plan, or a new one if there are overrides."""
    if not overrides:
        return planned_from_record(record)
    fixed = [each for each in overrides if each.partition("=")[0].split(".")[0] not in _CHANGEABLE]
    if fixed:
        raise RequestError(
            f"`{fixed[0]}` would make it another run; a run may change {', '.join(_CHANGEABLE)}"
        )
    require_unchanged(record, REQUEST_FILE)
    request = Request.resolve(record.folder / REQUEST_FILE, overrides)
    return plan(request, progress=progress)


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
    """Yields text that a run's newest good checkpoint generates after a prompt, piece by piece.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        prompt: the beginning of the text, which is not repeated.
        root: the folder that holds the run folders.
        tokens: the most tokens to generate.
        temperature: 0 always takes the likeliest token; 1 samples the model's distribution.
        top_k: sample only from this many of the likeliest tokens.
        seed: the same seed generates the same text.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: its model does not predict the next token.
        CheckpointError: it has no complete checkpoint.
    """
    from windlass.data import load_tokenizer
    from windlass.runtime import SamplingOptions, generate_text, latest_checkpoint, merge_shards

    record = load(run, root=root)
    planned = planned_from_record(record)
    require_unchanged(record, TOKENIZER_FILE)
    if not is_causal(planned.request.model.name):
        raise RequestError(
            f"`{planned.request.model.name}` predicts masked tokens, not the next one, and cannot "
            "generate text; sample a run of a causal model"
        )
    checkpoint = latest_checkpoint(record.folder / CHECKPOINT_FOLDER)
    if checkpoint is None:
        raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
    stack = build_requested_model(planned.request.model)
    tokenizer = load_tokenizer(record.folder / TOKENIZER_FILE)
    with TemporaryDirectory(dir=record.folder) as folder:
        generated = generate_text(
            stack,
            merge_shards(checkpoint, stack, Path(folder) / MERGED_CHECKPOINT_FOLDER),
            tokenizer.encode(prompt) or [tokenizer.end_of_text],
            SamplingOptions(
                count=tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                end_token=tokenizer.end_of_text,
            ),
        )
        yield from tokenizer.stream_decode(generated)
