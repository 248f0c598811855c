"""The tasks that a run scores while it trains, kept in its folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import RequestError
from windlass.models import is_causal
from windlass.schema import TASKS_FOLDER, TOKENIZER_FILE, ResolvedRequest

if TYPE_CHECKING:
    from windlass.data import EncodedTask, ExampleDataset, Task, TokenDataset


def requested_tasks(
    request: ResolvedRequest, tokens: "TokenDataset | ExampleDataset", longest: int | None
) -> "tuple[Task, ...]":
    """The tasks that a request names, all of which the run's model can answer.

    Args:
        request: the run's.
        tokens: what it is trained on.
        longest: most tokens that its model reads; None if it sets no limit.

    Raises:
        RequestError: a task cannot be read, two have one name, or the model predicts no next token
            of a text.
        InputErrors: lines of a task that are none, or choices that are too long for the model.
    """
    from windlass.data import ExampleDataset, encode_task, load_task

    paths = request.train.tasks or ()
    if not paths:
        return ()
    if not is_causal(request.model.name):
        raise RequestError(
            f"`{request.model.name}` predicts masked tokens, and `train.tasks` are scored by the "
            "next token; leave them out, or take a causal model"
        )
    if isinstance(tokens, ExampleDataset):
        raise RequestError(
            "the run is trained on token ids and has no tokenizer, so that it cannot read "
            "`train.tasks`; leave them out"
        )
    tasks = tuple(load_task(Path(path)) for path in paths)
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(
                f"{names.count(name)} of `train.tasks` are named `{name}`; give each a name of its "
                "own (`name` in its TOML file)"
            )
    for task in tasks:
        encode_task(task, tokens.tokenizer, longest)
    return tasks


def save_run_tasks(tasks: "tuple[Task, ...]", folder: Path) -> tuple[str, ...]:
    """Writes the tasks of a run into its folder, and returns the names of the files.

    Raises:
        StorageError: the disk is full or not writable.
    """
    from windlass.data import save_task

    for task in tasks:
        save_task(task, folder / TASKS_FOLDER)
    files = sorted((folder / TASKS_FOLDER).iterdir()) if tasks else ()
    return tuple(str(file.relative_to(folder)) for file in files)


def load_run_tasks(folder: Path, longest: int | None) -> "tuple[EncodedTask, ...]":
    """The tasks that a run scores while it trains, as its model reads them.

    Args:
        folder: the run's.
        longest: most tokens that its model reads; None if it sets no limit.

    Raises:
        RequestError: a file of a task was removed.
        InputErrors: a file of a task was changed, and is none any more.
    """
    from windlass.data import encode_task, load_task, load_tokenizer

    files = sorted((folder / TASKS_FOLDER).glob("*.toml"))
    if not files:
        return ()
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    return tuple(encode_task(load_task(file), tokenizer, longest) for file in files)
