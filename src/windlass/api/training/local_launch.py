"""Trains on several ranks of this host, each a process that this one starts and watches."""

import shlex
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.plan import Planned
from windlass.api.training.instrumentation import LoopHooks
from windlass.errors import RankError, RunBroken
from windlass.program import Program, mesh_coord
from windlass.schema import CHECKPOINT_FOLDER, Step

if TYPE_CHECKING:
    from windlass.runtime import WatchdogTimeouts

_HANG_STEPS = 10
_MIN_HANG_SECONDS = 60.0
"""A rank hangs if it makes no progress for this long, or for ten predicted steps if that is longer.

Compilation makes no visible progress. It happens before the first step and has time of its own.
"""


def train_local_ranks(
    planned: Planned,
    programs: tuple[Program, ...],
    folder: Path,
    *,
    attempt: int,
    checkpoint: Path | None,
    hooks: LoopHooks,
) -> Generator[Step]:
    """Trains on several local ranks, and yields each step once all of them have done it.

    Args:
        planned: a plan for several devices.
        programs: one program for each rank.
        folder: the run folder.
        attempt: number of this attempt; each rank journals it in a file of its own.
        checkpoint: the checkpoint that all ranks start from; None starts from the beginning.
        hooks: what the caller attaches; the ranks have heartbeats of their own.

    Raises:
        WindlassError: a rank failed; the message names it, its mesh coordinates and instruction.
    """
    import torch

    from windlass.runtime import LocalLauncher, rank_placements, remove_temporaries
    from windlass.torch_ext import device_for

    parallel, instrumentation = planned.plan.parallel, hooks.instrumentation
    command = [sys.executable, "-m", "windlass", "rank", str(folder), "--attempt", str(attempt)]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    command += instrumentation.command_options() if instrumentation else []
    coords = [mesh_coord(rank, parallel) for rank in range(parallel.devices)]
    # The threads of this process, which may be a part of the cores, as for one of several jobs.
    placements = rank_placements(
        device_for(f"{planned.machine.device.kind}:0"), parallel.devices, torch.get_num_threads()
    )
    checkpoints = folder / CHECKPOINT_FOLDER
    launcher = LocalLauncher(
        folder, command, programs, coords, timeouts=watchdog_timeouts(planned),
        placements=placements,
    )  # fmt: skip
    try:
        with closing(launcher):
            for fields in launcher.steps(hooks.stop):
                step = Step(**fields)
                try:
                    yield step
                except GeneratorExit:
                    # As on a single device, a save that has begun is completed even if the caller
                    # asks for no further step.
                    if step.saved:
                        launcher.wait_until_saved(checkpoints / step.saved)
                    raise
    except (RunBroken, RankError) as error:
        error.args = (f"{error}; {_where_to_resume(checkpoints)}",)
        raise
    finally:
        # A save whose ranks died has left these, on a disk that they may have filled.
        remove_temporaries(checkpoints)


def watchdog_timeouts(planned: Planned) -> "WatchdogTimeouts":
    """How long the ranks of a run may make no progress before a hang is reported."""
    from windlass.runtime import WatchdogTimeouts

    requested, prediction = planned.request.train.hang_timeout_seconds, planned.prediction
    seconds = requested or max(_MIN_HANG_SECONDS, _HANG_STEPS * prediction.high_seconds)
    return WatchdogTimeouts(hang_seconds=seconds, compile_seconds=prediction.compile_seconds)


def _where_to_resume(checkpoints: Path) -> str:
    """The last checkpoint and the command that resumes from it, as a clause of a message."""
    from windlass.runtime import checkpoint_folders

    folders = checkpoint_folders(checkpoints)
    if not folders:
        return "no checkpoint was written yet"
    command = f"windlass resume {shlex.quote(str(checkpoints.parent))}"
    return f"the last checkpoint is `{folders[-1]}`; continue with `{command}`"
