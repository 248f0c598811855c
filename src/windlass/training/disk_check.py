"""Checks that the disk has space for a run, before anything is written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from windlass.atomic_files import free_disk_bytes
from windlass.errors import StorageError
from windlass.jobs import Planned
from windlass.program import DiskUsage, disk_usage
from windlass.schema import CHECKPOINT_FOLDER, STATE_FOLDER, optimizer_law
from windlass.units import format_bytes

_BLOCK_BYTES = 512
"""Unit of `st_blocks`, the disk space of a file. Source: `man 3type stat`."""


def require_disk_space(planned: Planned, folder: Path) -> None:
    """Refuses a run that would fill the disk.

    Args:
        folder: the run folder, or the folder it will lie in; it need not exist yet.

    Raises:
        StorageError: the disk lacks space; the message names what would help.
    """
    needed = disk_usage(planned.plan, planned.graph, planned.request.train)
    free = free_disk_bytes(folder)
    if needed.needed_bytes <= free:
        return
    remedies = (
        *_remedies(planned, needed),
        "name a folder on another disk with `--folder`",
    )
    raise StorageError(
        f"this run would take {format_bytes(needed.needed_bytes)} under `{folder}`, where "
        f"{format_bytes(free)} are free: {_parts(needed)}; {', or '.join(remedies)}"
    )


def require_disk_space_to_resume(planned: Planned, folder: Path, done: int, kept: int) -> None:
    """Refuses to resume a run that would fill the disk.

    Existing checkpoints count towards what the run needs, and offloaded state that a killed
    attempt has left is reused.

    Raises:
        StorageError: the disk lacks space; the message says how much.
    """
    plan, graph = planned.plan, planned.graph
    if kept:
        base = plan.precision if _refers_to_base(folder / CHECKPOINT_FOLDER) else None
        graph = graph.model_copy(update={"base": base})
    needed = disk_usage(
        plan,
        graph,
        planned.request.train,
        steps_done=done,
        checkpoints_present=kept,
    )
    present = disk_usage_bytes(folder / CHECKPOINT_FOLDER, folder / STATE_FOLDER)
    free = free_disk_bytes(folder)
    lacking = needed.needed_bytes - present - free
    if lacking <= 0:
        return
    raise StorageError(
        f"resuming takes {format_bytes(needed.needed_bytes)} under `{folder}`, which holds "
        f"{format_bytes(present)} of it, and {format_bytes(free)} are free: {_parts(needed)}; free "
        f"{format_bytes(lacking)} more, or move the folder to another disk"
    )


def _refers_to_base(checkpoints: Path) -> bool:
    """Whether the newest checkpoint refers to frozen weights in the files of its base."""
    newest = max(checkpoints.glob("step-*"), default=None)
    if newest is None:
        return False
    from windlass.models import PLACES_SUFFIX

    return any(newest.glob(f"*{PLACES_SUFFIX}"))


def disk_usage_bytes(*folders: Path) -> int:
    """Disk space of all files in some folders; hard links count once, missing folders as 0."""
    sizes: dict[tuple[int, int], int] = {}
    for root in folders:
        for folder, _, files in os.walk(root):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    stat = Path(folder, name).stat()
                    sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * _BLOCK_BYTES
    return sum(sizes.values())


def _parts(needed: DiskUsage) -> str:
    """What takes the space when the run needs most, as a clause of a message."""
    parts = [f"{format_bytes(needed.state_bytes)} of state"] if needed.state_bytes else []
    if needed.shared_bytes:
        parts.append(f"{format_bytes(needed.shared_bytes)} of frozen weights")
    if needed.checkpoints:
        count = f"{needed.checkpoints} checkpoint{'s' if needed.checkpoints > 1 else ''}"
        separate = " that no longer share its files" if needed.state_bytes else ""
        parts.append(f"{count} of {format_bytes(needed.checkpoint_bytes)}{separate}")
    return " and ".join(parts)


def _remedies(planned: Planned, needed: DiskUsage) -> Iterator[str]:
    """Overrides that take less space, and how much each takes."""
    plan, train = planned.plan, planned.request.train
    for override, changes in (
        ("train.keep=1", {"keep": 1}),
        (f"train.save_every={train.steps}", {"save_every": train.steps}),
    ):
        fewer = train.model_copy(update=changes)
        less = disk_usage(plan, planned.graph, fewer).needed_bytes
        if less < needed.needed_bytes:
            yield f"`{override}` takes {format_bytes(less)}"
    if not optimizer_law(plan.optimizer).quantizes_moments:
        return
    compact = plan.model_copy(update={"moments": "int8"})
    less = disk_usage(compact, planned.graph, train).needed_bytes
    if less < needed.needed_bytes:
        yield f"`moments=int8` takes {format_bytes(less)}"
