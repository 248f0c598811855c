"""Pods: a run on several devices of this host, each a process; this one starts and watches them."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.plan import Planned
from windlass.api.verify.instrumentation import Scrutiny
from windlass.errors import DeviceError, RunBroken
from windlass.hardware.local_machine import cores
from windlass.program.device_mesh import place_of
from windlass.program.instruction import Program
from windlass.schema import run_record as names
from windlass.schema.run_record import Step

if TYPE_CHECKING:
    from windlass.runtime.distributed.local_launcher import Patience

_SILENT_STEPS = 10
_LEAST_SILENCE = 60.0
"""Seconds without any progress after which a device is named: so long, or ten predicted steps.

Compiling is no progress that can be seen, and comes before the first step.
"""


def abreast(
    planned: Planned,
    programs: tuple[Program, ...],
    folder: Path,
    *,
    attempt: int,
    checkpoint: Path | None,
    stop: Callable[[], bool],
    scrutiny: Scrutiny | None = None,
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
    from windlass.runtime.distributed.local_launcher import Devices

    cut = planned.plan.parallel
    command = [sys.executable, "-m", "windlass", "device", str(folder), "--attempt", str(attempt)]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    command += scrutiny.words() if scrutiny else []
    places = [place_of(device, cut) for device in range(cut.devices)]
    threads = max(1, cores() // cut.devices)
    checkpoints = folder / names.CHECKPOINT_FOLDER
    devices = Devices(
        folder, command, programs, places,
        patience=patience_with(planned), threads=threads,
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
    except (RunBroken, DeviceError) as error:
        error.args = (f"{error}; {_last_good(checkpoints)}",)
        raise
    finally:
        # Of a save that its devices did not live to end, on a disk that may be full by it.
        remove_temporaries(checkpoints)


def patience_with(planned: Planned) -> "Patience":
    """How long the devices of a run may be silent before one is named."""
    from windlass.runtime.distributed.local_launcher import Patience

    asked, prediction = planned.request.train.hang_timeout_seconds, planned.prediction
    silence = asked or max(_LEAST_SILENCE, _SILENT_STEPS * prediction.high_seconds)
    return Patience(silence=silence, compiling=prediction.compile_seconds)


def _last_good(checkpoints: Path) -> str:
    """Where to go on from, in words."""
    from windlass.runtime.checkpoint.checkpoint import stored

    there = stored(checkpoints)
    if not there:
        return "no checkpoint was written yet"
    return f"the last checkpoint is `{there[-1]}`; `windlass resume {checkpoints.parent}` goes on"
