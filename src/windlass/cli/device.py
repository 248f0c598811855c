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
    with api.as_device(
        folder, port=port, device=device, attempt=attempt, checkpoint=checkpoint
    ) as steps:
        for step in steps:
            _tell(asdict(step) | {"by_kind": dict(step.by_kind)})
        _tell(None)


def _tell(told: dict[str, object] | None) -> None:
    """One line of JSON for the process that started this one; None: all is done and saved."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
