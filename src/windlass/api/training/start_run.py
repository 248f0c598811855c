"""Starts a new run: creates its folder once everything that it needs is known to be there."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windlass.api.machines import Progress
from windlass.api.plan import Planned
from windlass.api.training.disk_check import require_disk_space
from windlass.api.training.run_files import run_documents, run_metadata
from windlass.api.training.setup import (
    load_run_tokens,
    make_batches,
    prepare_tokens,
    require_vocabulary,
    verified_programs,
)
from windlass.program import Program
from windlass.schema import TOKENIZER_FILE
from windlass.tracking import RunFolder, create_run_folder, require_no_other_content

if TYPE_CHECKING:
    from windlass.data import Batches, TokenDataset


class StartedRun(NamedTuple):
    """A run before its first step."""

    folder: RunFolder
    programs: tuple[Program, ...]
    """One for each rank."""
    tokens: "TokenDataset"
    batches: "Batches"


def start_run(
    planned: Planned, *, root: Path | str, folder: Path | None, progress: Progress | None
) -> StartedRun:
    """Creates and locks the folder of a new run, and writes its documents and tokenizer there.

    Args:
        planned: what will be run.
        root: the folder that holds the run folders.
        folder: use this folder instead of a new one under `root`, and the tokens in it if there
            are any.
        progress: called with how far preparations are.

    Raises:
        WindlassError: what is wrong with the plan, the data, the disk or the folder.
    """
    if folder is not None:
        require_no_other_content(folder)
    require_disk_space(planned, folder or Path(root))
    tokens = load_run_tokens(folder) if folder is not None else None
    tokens = tokens or prepare_tokens(planned.request, progress)
    require_vocabulary(planned, tokens)
    batches, programs = make_batches(planned, tokens), verified_programs(planned)
    run_folder = create_run_folder(
        Path(root),
        planned.request.model.name,
        documents=run_documents(planned, programs),
        meta=run_metadata(planned, tokens),
        folder=folder,
    )
    tokens.tokenizer.save(run_folder.path / TOKENIZER_FILE)
    run_folder.seal(TOKENIZER_FILE)
    return StartedRun(run_folder, programs, tokens, batches)
