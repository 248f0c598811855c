"""Beginning: a new run's folder, made once all that it needs is proved to be there."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windlass.api.plan import Planned, Progress
from windlass.api.training.disk_check import require_disk
from windlass.api.training.run_files import documents, meta
from windlass.api.training.setup import batches, proved, require_room, tokens_of
from windlass.program.instruction import Program
from windlass.schema import run_record as names
from windlass.tracking.run_folder import RunFolder, create

if TYPE_CHECKING:
    from windlass.data.batches import Batches
    from windlass.data.token_files import Tokens


class Begun(NamedTuple):
    """A run before its first step."""

    held: RunFolder
    programs: tuple[Program, ...]
    tokens: "Tokens"
    batches: "Batches"


def begin(
    planned: Planned, *, root: Path | str, folder: Path | None, progress: Progress | None
) -> Begun:
    """Holds a run's folder, with what describes the run and its tokenizer in it.

    Args:
        planned: what it runs.
        root: where run folders lie.
        folder: takes this folder in place of a new one under `root`.
        progress: told how far preparations are.

    Raises:
        WindlassError: what is wrong with the plan, the data, the disk or the folder.
    """
    require_disk(planned, folder or Path(root))
    tokens = tokens_of(planned.request, progress)
    require_room(planned, tokens)
    found, programs = batches(planned, tokens), proved(planned)
    held = create(
        Path(root),
        planned.request.model.name,
        documents=documents(planned, programs),
        meta=meta(planned, tokens),
        folder=folder,
    )
    tokens.tokenizer.save(held.path / names.TOKENIZER_FILE)
    return Begun(held, programs, tokens, found)
