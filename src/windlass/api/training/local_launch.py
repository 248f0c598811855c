"""Pods: a run on several devices of this host, each a process; this one starts and watches them."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.plan import Planned
from windlass.api.training.instrumentation import Instrumentation
from windlass.errors import RankError, RunBroken
from windlass.hardware.local_machine import core_count
from windlass.program.device_mesh import mesh_coord
from windlass.program.instruction import Program
from windlass.schema import run_record as names
from windlass.schema.run_record import Step

if TYPE_CHECKING:
    from windlass.runtime.distributed.local_launcher import WatchdogTimeouts

_SILENT_STEPS = 10
_LEAST_SILENCE = 60.0
"""Seconds without any progress after which a device is named: so long, or ten predicted steps.

Compiling is no progress that can be seen, and comes before the first step.
"""


def train_local_ranks(
    planned: Planned,
    programs: tuple[Program, ...],
    folder: Path,
    *,
    attempt: int,
    checkpoint: Path | None,
    stop: Callable[[], bool],
    instrumentation: Instrumentation | None = None,
) -> Generator[Step]:
    """Trains on several devices, and yields each step once all have done it.

    Args:
        planned: of several devices.
        programs: one for each.
        folder: of the run.
        attempt: of the run; each device journals it in a file of its own.
        checkpoint: that all go on from; None begins anew.
        stop: asked all the time; True ends with the step under way, and saves.
        scrutiny: of a proof.

    Raises:
        WindlassError: a device failed; the message names it, with its place and instruction.
    """
    from windlass.runtime.checkpoint.checkpoint import remove_temporaries
    from windlass.runtime.distributed.local_launcher import LocalLauncher

    cut = planned.plan.parallel
    command = [sys.executable, "-m", "windlass", "device", str(folder), "--attempt", str(attempt)]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    command += instrumentation.command_options() if instrumentation else []
    places = [mesh_coord(device, cut) for device in range(cut.devices)]
    threads = max(1, core_count() // cut.devices)
    checkpoints = folder / names.CHECKPOINT_FOLDER
    devices = LocalLauncher(
        folder, command, programs, places,
        patience=watchdog_timeouts(planned), threads=threads,
    )  # fmt: skip
    try:
        with closing(devices):
            for told in devices.steps(stop):
                step = Step(**told)
                try:
                    yield step
                except GeneratorExit:
                    # As on one device: a save is ended, also if nobody asks for more.
                    if step.saved:
                        devices.await_saved(checkpoints / step.saved)
                    raise
    except (RunBroken, RankError) as error:
        error.args = (f"{error}; {_last_good(checkpoints)}",)
        raise
    finally:
        # Of a save that its devices did not live to end, on a disk that may be full by it.
        remove_temporaries(checkpoints)


def watchdog_timeouts(planned: Planned) -> "WatchdogTimeouts":
    """How long the devices of a run may be silent before one is named."""
    from windlass.runtime.distributed.local_launcher import WatchdogTimeouts

    asked, prediction = planned.request.train.hang_timeout_seconds, planned.prediction
    silence = asked or max(_LEAST_SILENCE, _SILENT_STEPS * prediction.high_seconds)
    return WatchdogTimeouts(silence=silence, compiling=prediction.compile_seconds)


def _last_good(checkpoints: Path) -> str:
    """Where to go on from, in words."""
    from windlass.runtime.checkpoint.checkpoint import checkpoint_folders

    there = checkpoint_folders(checkpoints)
    if not there:
        return "no checkpoint was written yet"
    return f"the last checkpoint is `{there[-1]}`; `windlass resume {checkpoints.parent}` goes on"
