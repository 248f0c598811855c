"""Trains on several ranks of this host, each a process that this one starts and watches."""

import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.child_processes import ChildProcesses, module_command
from windlass.cost import compile_seconds
from windlass.errors import RankError, RunBroken
from windlass.fork_server import ForkServer
from windlass.jobs import Planned
from windlass.program import Program, mesh_coord
from windlass.schema import CHECKPOINT_FOLDER, Step
from windlass.training.loop.hooks import LoopHooks

if TYPE_CHECKING:
    from windlass.runtime import LocalLauncher, WatchdogTimeouts

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
    server: ForkServer | None = None,
) -> Generator[Step]:
    """Trains on several local ranks, and yields each step once all of them have done it.

    Args:
        planned: a plan for several devices.
        attempt: number of this attempt; each rank journals it in a file of its own.
        checkpoint: the checkpoint that all ranks start from; None starts from the beginning.
        hooks: what the caller attaches; the ranks have heartbeats of their own.
        server: forks the ranks; None starts each anew.

    Raises:
        WindlassError: a rank failed; the message names it, its mesh coordinates and instruction.
    """
    from windlass.runtime import remove_temporaries

    instrumentation = hooks.instrumentation
    options = ["--attempt", str(attempt)]
    if checkpoint is not None:
        options += ["--checkpoint", str(checkpoint)]
    options += instrumentation.command_options() if instrumentation else []
    checkpoints = folder / CHECKPOINT_FOLDER
    launcher = launch_local_ranks(planned, programs, folder, options, server)
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


def launch_local_ranks(
    planned: Planned,
    programs: tuple[Program, ...],
    folder: Path,
    options: Sequence[str],
    server: ForkServer | None = None,
) -> "LocalLauncher":
    """Starts the ranks of a plan on this host, which the caller closes.

    Args:
        options: those of `windlass rank` that all ranks get.
        server: forks the ranks; None starts each anew.
    """
    import torch

    from windlass.runtime import LocalLauncher, rank_placements
    from windlass.torch_ext import device_for

    parallel = planned.plan.parallel
    # The threads of this process, which may be a part of the cores, as for one of several jobs.
    placements = rank_placements(
        device_for(f"{planned.machine.device.kind}:0"), parallel.devices, torch.get_num_threads()
    )
    try:
        return LocalLauncher(
            folder,
            ChildProcesses(module_command("windlass"), server),
            ["rank", str(folder), *options],
            programs,
            [mesh_coord(rank, parallel) for rank in range(parallel.devices)],
            timeouts=watchdog_timeouts(planned),
            placements=placements,
        )
    finally:
        if server is not None:
            server.close()


def rank_server(planned: Planned, ranks: int) -> ForkServer | None:
    """Imports what the ranks of a plan need, while this process still prepares; None forks none.

    A process that has used an accelerator cannot be forked, and nobody has seen yet whether one
    that has only imported torch can on each kind of them: their ranks start anew.
    """
    kind = planned.machine.device.kind
    if ranks == 1 or kind != "cpu" or not sys.platform.startswith("linux"):
        return None
    return ForkServer(module_command("windlass", "rank-server"))


def watchdog_timeouts(planned: Planned) -> "WatchdogTimeouts":
    """How long the ranks of a run may make no progress before a hang is reported."""
    from windlass.runtime import WatchdogTimeouts

    requested, prediction = planned.request.train.hang_timeout_seconds, planned.prediction
    # In full, because torch may have removed code that a prediction counts as kept.
    compiling = compile_seconds(planned.plan, planned.graph, planned.machine)
    seconds = requested or max(_MIN_HANG_SECONDS, _HANG_STEPS * prediction.high_seconds)
    return WatchdogTimeouts(hang_seconds=seconds, compile_seconds=compiling)


def _where_to_resume(checkpoints: Path) -> str:
    """The last checkpoint and the command that resumes from it, as a clause of a message."""
    from windlass.runtime import checkpoint_folders

    folders = checkpoint_folders(checkpoints)
    if not folders:
        return "no checkpoint was written yet"
    command = f"windlass resume {shlex.quote(str(checkpoints.parent))}"
    return f"the last checkpoint is `{folders[-1]}`; continue with `{command}`"
