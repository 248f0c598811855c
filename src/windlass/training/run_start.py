"""Starts a new run: creates its folder once everything that it needs is known to be there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windlass.jobs import Planned, Progress, prepare_data, size_of
from windlass.models import find_model_folder, is_huggingface
from windlass.program import Program
from windlass.tracking import (
    RunFolder,
    create_run_folder,
    is_unfinished_start,
    require_no_other_content,
)
from windlass.training.disk_check import require_disk_space
from windlass.training.inputs.batches import (
    data_metadata,
    data_notes,
    make_batches,
    with_document_lengths,
)
from windlass.training.inputs.data_fit import require_vocabulary
from windlass.training.inputs.job import require_named_data
from windlass.training.inputs.model_config import save_model_config
from windlass.training.inputs.run_data import (
    load_run_tokens,
    requested_text_fingerprint,
    save_run_data,
)
from windlass.training.inputs.run_tasks import requested_tasks
from windlass.training.legs import plan_later_legs
from windlass.training.parent import (
    ParentRun,
    link_to_parent,
    plan_of_child,
    require_tokens_of_parent,
    start_from_parent,
)
from windlass.training.preconditions import (
    note_sparse_kernels,
    require_engine,
    require_one_process,
    require_pretrained_model,
    verified_programs,
)
from windlass.training.run_files import input_documents, run_documents, run_metadata

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset, TrainingBatches
    from windlass.runtime import Checkpoint


class StartedRun(NamedTuple):
    """A run before its first step."""

    planned: Planned
    """What is run."""
    folder: RunFolder
    programs: tuple[Program, ...]
    """One for each rank."""
    tokens: "TokenDataset | ExampleDataset"
    batches: "TrainingBatches"
    checkpoint: "Checkpoint | None"
    """Where it starts; None starts from the beginning."""


def start_run(
    planned: Planned,
    *,
    root: Path | str,
    folder: Path | None,
    parent: ParentRun | None = None,
    group: str | None = None,
    progress: Progress | None,
    fill: "Callable[[RunFolder, TokenDataset | ExampleDataset], object]" = lambda *_: None,
) -> StartedRun:
    """Creates and locks the folder of a new run, and writes its documents and tokenizer there.

    Args:
        planned: what will be run.
        folder: use this folder instead of a new one under `root`, and the tokens in it if there
            are any.
        parent: the run to start from; None starts from the beginning.
        group: a name that several runs share, such as that of a sweep.
        progress: called with how far preparations are.
        fill: writes what else is in the folder before it counts as a run.

    Raises:
        WindlassError: what is wrong with the plan, the data, the disk or the folder.
    """
    if folder is not None:
        require_no_other_content(folder)
    if parent is not None:
        planned = plan_of_child(planned, parent)
    planned = plan_later_legs(planned, parent, progress)
    require_engine(planned)
    require_one_process(planned)
    planned = note_sparse_kernels(planned, progress)
    if parent is None:
        require_pretrained_model(planned)
    require_disk_space(planned, folder or Path(root))
    require_named_data(planned)
    tokens, meta = _dataset(planned, folder, progress)
    planned = replace(planned, data=size_of(tokens, planned.request))
    if parent:
        meta["parent"] = parent.metadata
    if group is not None:
        meta["group"] = group
    if progress is not None:
        progress("loading torch", 0, None)  # which takes seconds, and what follows computes
    require_vocabulary(planned, tokens)
    if parent is not None:
        require_tokens_of_parent(parent, tokens)
    batches, programs = make_batches(planned, tokens), verified_programs(planned)
    if progress is not None:
        progress("loading torch", 1, 1)
    planned = with_document_lengths(planned, batches)
    planned = replace(planned, notes=(*planned.notes, *data_notes(batches)))
    tasks = requested_tasks(planned.request, tokens, planned.graph.max_sequence)

    def fill_folder(run: RunFolder) -> None:
        run.seal(
            *save_run_data(tokens, run.path),
            *tasks.save(run.path),
            *save_model_config(planned.request.model.name, run.path),
        )
        link_to_parent(parent, planned, run.path)
        fill(run, tokens)

    run_folder = create_run_folder(
        Path(root),
        _short_name(planned.request.model.name),
        documents=run_documents(planned, programs) | input_documents(planned, tokens),
        meta=run_metadata(planned, tokens) | data_metadata(batches) | meta,
        folder=folder,
        fill=fill_folder,
    )
    checkpoint = start_from_parent(parent, planned, run_folder.path)
    return StartedRun(planned, run_folder, programs, tokens, batches, checkpoint)


def _dataset(
    planned: Planned, folder: Path | None, progress: Progress | None
) -> tuple["TokenDataset | ExampleDataset", dict[str, object]]:
    """What a run trains on, and what its record says of a text that was read for it."""
    if planned.objects.examples is not None:
        return planned.objects.examples, {}
    kept = None if folder is None or is_unfinished_start(folder) else load_run_tokens(folder)
    if kept is not None:
        return kept, {}
    tokens = prepare_data(planned.request, progress)
    return tokens, {"text": requested_text_fingerprint(planned.request)}


def _short_name(model: str) -> str:
    """The part of a model's name that a run's folder bears: of a long path, its end."""
    return find_model_folder(model).config.resolve().parent.name if is_huggingface(model) else model
