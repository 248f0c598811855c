"""`windlass device`: one of a run's devices; started by the process that trains, not by people."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from windlass import api


def device(
    folder: Path, *, port: int, device: int, attempt: int, checkpoint: Path | None = None
) -> None:
    """Be one device of a run on several.

    Args:
        folder: of the run.
        port: of the loopback, where the devices meet.
        device: which of them this is.
        attempt: of the run.
        checkpoint: that all go on from.
    """
    steps = api.run_device(folder, port=port, device=device, attempt=attempt, checkpoint=checkpoint)
    for step in steps:
        told = asdict(step) | {"by_kind": dict(step.by_kind)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
