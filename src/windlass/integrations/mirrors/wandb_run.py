"""Writes a run as an offline run of W&B by its package; `wandb sync` sends it from there."""

import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from windlass.errors import RecordError, RequestError
from windlass.integrations.imports.wandb_offline import read_wandb
from windlass.integrations.portable_run import PortableRun
from windlass.tracking import JournalRow

_PROJECT = "windlass"
_MAX_TAG = 64
"""Characters of a tag; W&B refuses more."""


def write_wandb(run: PortableRun, place: str, documents: Mapping[str, Path]) -> str:
    """Writes an offline run below the folder `place`, and returns its folder.

    An earlier copy there that has all rows stays; one that lacks some is written anew. W&B keeps
    one value of a name for a step, the last one.

    Raises:
        RequestError: wandb is not installed.
        RecordError: W&B refuses the run.
    """
    try:
        wandb = import_module("wandb")
    except ImportError:
        raise RequestError("`wandb:` needs W&B; install it by `pip install wandb`") from None
    rows = _merged_rows(run)
    root = Path(place)
    for copy in sorted((root / "wandb").glob(f"offline-run-*-{run.origin_id}")):
        if _has_all(copy, run, rows):
            return str(copy)
        shutil.rmtree(copy)
    root.mkdir(parents=True, exist_ok=True)
    try:
        return _write(wandb, run, rows, root, documents)
    except (wandb.errors.Error, OSError) as error:
        raise RecordError(f"W&B refuses the run: {error}") from None


def _write(
    wandb: ModuleType,
    run: PortableRun,
    rows: Sequence[JournalRow],
    root: Path,
    documents: Mapping[str, Path],
) -> str:
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
    )
    copy = wandb.init(
        mode="offline",
        dir=str(root),
        id=run.origin_id,
        name=run.name,
        project=run.project or _PROJECT,
        group=run.group,
        tags=[tag[:_MAX_TAG] for tag in run.tags],
        notes=run.notes or None,
        config=dict(run.config),
        settings=settings,
        reinit="create_new",
    )
    for row in rows:
        copy.log({**row.values, "_timestamp": row.time}, step=row.step)
    for path in documents.values():
        shutil.copy(path, copy.dir)
    copy.finish(exit_code=0 if run.state in (None, "finished") else 1)
    return str(Path(copy.dir).parent)


def _has_all(copy: Path, run: PortableRun, rows: Sequence[JournalRow]) -> bool:
    """Whether an earlier copy has all rows, and the end of a run that has ended."""
    unreadable: list[str] = []
    copies = list(read_wandb(copy.glob("*.wandb"), unreadable))
    return (
        not unreadable
        and len(copies) == 1
        and run.state is not None
        and copies[0].state is not None
        and sum(len(row.values) for row in copies[0].rows) == sum(len(row.values) for row in rows)
    )


def _merged_rows(run: PortableRun) -> list[JournalRow]:
    """One row for each step, in order; the later value of a name counts."""
    rows: list[JournalRow] = []
    for row in sorted(run.rows, key=lambda row: row.step):
        if rows and rows[-1].step == row.step:
            values = {**rows.pop().values, **row.values}
            rows.append(JournalRow(step=row.step, time=row.time, values=values))
        else:
            rows.append(row)
    return rows
