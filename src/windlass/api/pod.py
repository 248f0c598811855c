"""Pods: a run on several devices of this host, each a process; this one starts and watches them."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

from windlass.api.plan import Planned
from windlass.machines.here import cores
from windlass.program.instruction import Program
from windlass.program.layout import place_of
from windlass.spec.record import Step

_SILENT_STEPS = 10
_LEAST_SILENCE = 60.0
"""Seconds without any progress after which a device is named: so long, or ten predicted steps."""


def abreast(
    planned: Planned,
    programs: tuple[Program, ...],
    folder: Path,
    *,
    attempt: int,
    checkpoint: Path | None,
    stop: Callable[[], bool],
) -> Generator[Step]:
    """Trains on several devices, and yields each step once all have done it.

    Args:
        planned: of several devices.
        programs: one for each.
        folder: of the run.
        attempt: of the run; each device journals it in a file of its own.
        checkpoint: that all go on from; None begins anew.
        stop: asked all the time; True ends with the step under way, and saves.

    Raises:
        WindlassError: a device failed; the message names it, with its place and instruction.
    """
    from windlass.runtime.launch import Devices

    cut = planned.plan.cut
    command = [sys.executable, "-m", "windlass", "device", str(folder), "--attempt", str(attempt)]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    silence = max(_LEAST_SILENCE, _SILENT_STEPS * planned.prediction.high_seconds)
    places = [place_of(device, cut) for device in range(cut.devices)]
    threads = max(1, cores() // cut.devices)
    devices = Devices(folder, command, programs, places, silence=silence, threads=threads)
    with closing(devices):
        for told in devices.steps(stop):
            yield Step(**told)
