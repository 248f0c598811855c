"""Disk: whether the one under a run's folder has room, said before anything is written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from windlass.api.plan import Planned
from windlass.atomic_files import free_disk_bytes
from windlass.errors import StorageError
from windlass.program.memory.disk_usage import DiskUsage, disk_usage
from windlass.schema.run_record import CHECKPOINT_FOLDER, STATE_FOLDER
from windlass.units import format_bytes

_BLOCK_BYTES = 512
"""In which `stat` counts what a file takes. Source: `man 3type stat`."""


def require_disk_space(planned: Planned, folder: Path) -> None:
    """Refuses a run that would fill the disk.

    Args:
        planned: the run.
        folder: where it would lie; it need not be there yet.

    Raises:
        StorageError: the disk lacks room; the message names what would help.
    """
    needed = disk_usage(planned.plan, planned.graph, planned.request.train)
    free = free_disk_bytes(folder)
    if needed.needed_bytes <= free:
        return
    ways = (*_ways(planned, needed), "name a folder on another disk with `--folder`")
    raise StorageError(
        f"this run would take {format_bytes(needed.needed_bytes)} under `{folder}`, where "
        f"{format_bytes(free)} are free: {_parts(needed)}; {', or '.join(ways)}"
    )


def require_disk_space_to_resume(planned: Planned, folder: Path, done: int, kept: int) -> None:
    """Refuses to go on with a run that would fill the disk.

    What its checkpoints take already is part of what it needs, and what a killed attempt left of
    its state is taken over.

    Args:
        planned: the run.
        folder: where it lies.
        done: steps that it has done.
        kept: checkpoints that are there.

    Raises:
        StorageError: the disk lacks room; the message says how much.
    """
    needed = disk_usage(
        planned.plan,
        planned.graph,
        planned.request.train,
        steps_done=done,
        checkpoints_present=kept,
    )
    held = disk_usage_bytes(folder / CHECKPOINT_FOLDER, folder / STATE_FOLDER)
    free = free_disk_bytes(folder)
    lacking = needed.needed_bytes - held - free
    if lacking <= 0:
        return
    raise StorageError(
        f"going on takes {format_bytes(needed.needed_bytes)} under `{folder}`, which holds "
        f"{format_bytes(held)} of it, and {format_bytes(free)} are free: {_parts(needed)}; free "
        f"{format_bytes(lacking)} more, or move the folder to another disk"
    )


def disk_usage_bytes(*folders: Path) -> int:
    """What files take of the disk, each once, by however many names; 0 of what is not there."""
    sizes: dict[tuple[int, int], int] = {}
    for top in folders:
        for folder, _, files in os.walk(top):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    found = Path(folder, name).stat()
                    sizes[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK_BYTES
    return sum(sizes.values())


def _parts(needed: DiskUsage) -> str:
    """What the room is for, at the fullest moment."""
    parts = [f"{format_bytes(needed.state_bytes)} of state"] if needed.state_bytes else []
    if needed.checkpoints:
        many = f"{needed.checkpoints} checkpoint{'s' if needed.checkpoints > 1 else ''}"
        own = " that no longer share its files" if needed.state_bytes else ""
        parts.append(f"{many} of {format_bytes(needed.checkpoint_bytes)}{own}")
    return " and ".join(parts)


def _ways(planned: Planned, needed: DiskUsage) -> Iterator[str]:
    """Changes that take less room, and how much they take."""
    plan, train = planned.plan, planned.request.train
    for override, changes in (
        ("train.keep=1", {"keep": 1}),
        (f"train.save_every={train.steps}", {"save_every": train.steps}),
    ):
        less = disk_usage(plan, planned.graph, train.model_copy(update=changes)).needed_bytes
        if less < needed.needed_bytes:
            yield f"`{override}` takes {format_bytes(less)}"
    small = plan.model_copy(update={"moments": "int8"})
    less = disk_usage(small, planned.graph, train).needed_bytes
    if less < needed.needed_bytes:
        yield f"`moments=int8` takes {format_bytes(less)}"
