"""What a caller attaches to a training loop: a stop request, a heartbeat, and instrumentation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.runtime import Handlers, HandlerWrapper, HeartbeatSlots, HookContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrumentation:
    """What a verification records and injects in a run; an ordinary run has none."""

    fault: str | None = None
    """Name of the fault to inject, a key of `FAULTS`; None injects none."""
    restart_after: int | None = None
    """Step after which all ranks stop, and start again from its checkpoint; None never does."""
    overflow: bool = False
    """Whether a gradient of the last rank, and of no other, overflows in some steps."""

    def command_options(self) -> list[str]:
        """The options of `windlass rank` that say the same."""
        options = {"--fault": self.fault, "--restart-after": self.restart_after}
        given = [(name, str(value)) for name, value in options.items() if value is not None]
        flags = ["--fingerprints", *(["--overflow"] if self.overflow else [])]
        return [*flags, *(word for option in given for word in option)]

    def handler_wrapper(self, folder: Path, rank: int) -> "HandlerWrapper":
        """A wrapper that records activation fingerprints, and injects what is asked for.

        Args:
            folder: the run folder, which receives the fingerprints.
            rank: the rank whose handlers are wrapped.
        """
        from windlass.runtime import (
            ActivationFingerprints,
            inject_fault,
            overflow_on_last_rank,
        )

        fingerprints = ActivationFingerprints(folder, rank)

        def wrap(handlers: "Handlers", context: "HookContext") -> "Handlers":
            if self.fault is not None:
                handlers = inject_fault(self.fault, handlers, context)
            if self.overflow:
                handlers = overflow_on_last_rank(handlers, context)
            return fingerprints.wrap(handlers, context)

        return wrap


def never_stop() -> bool:
    """A `stop` that never asks the training loop to stop."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHooks:
    """What a caller attaches to a training loop."""

    stop: Callable[[], bool] = never_stop
    """Polled by the loop; True ends it after the current step, with a checkpoint."""
    heartbeat: "HeartbeatSlots | None" = None
    """Receives the step and the index of each instruction as it begins."""
    instrumentation: Instrumentation | None = None
    """Present if the run is being verified."""
