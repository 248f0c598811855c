"""Code that came with a record: whose it is, and what it would do here."""

from collections.abc import Iterator
from pathlib import Path

from windlass.errors import RecordError
from windlass.jobs import RUNS, load
from windlass.schema import CodeTree
from windlass.tracking import RunRecord, is_from_this_host, kept_variables


def recorded_code(*names: str | Path, root: Path | str = RUNS) -> tuple[str, ...]:
    """What `bisect` would run and set of runs that were not made here, line by line.

    Args:
        names: the runs.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or more than one.
    """
    records = [load(name, root=root) for name in names]
    return tuple(line for record in records if _is_foreign(record) for line in _lines(record))


def require_code_of_this_host(*records: RunRecord) -> None:
    """Refuses runs whose code, request and variables somebody else may have written.

    Raises:
        RecordError: one was not made by this user on this machine, or has changed since.
    """
    for record in records:
        if _is_foreign(record):
            raise RecordError(
                f"run `{record.folder.name}` was not made by you on this machine, or has changed "
                "since, and bisect would run its model, its code and its settings here; "
                "`--run-recorded-code` shows them and then does so"
            )


def _is_foreign(record: RunRecord) -> bool:
    return not is_from_this_host(record.folder, record.id, record.events)


def _lines(record: RunRecord) -> Iterator[str]:
    yield f"run {record.folder.name}: model `{record.model}`"
    if record.environment is not None:
        for name, value in kept_variables(record.environment.variables).items():
            yield f"variable {name}={value}"
    trees = (record.code.windlass, record.code.project) if record.code else ()
    for title, tree in zip(("Windlass", "the project"), trees, strict=False):
        if tree is not None:
            yield from _tree_lines(title, tree)


def _tree_lines(title: str, tree: CodeTree) -> Iterator[str]:
    yield f"code of {title}: commit {tree.commit or 'unknown'}"
    yield from tree.diff.splitlines()
    for file in tree.untracked:
        yield f"file {file.name}:"
        yield from (f"+{line}" for line in file.text.splitlines())
