"""Scrutiny: how closely a run is looked at, and what is spoiled in it on purpose."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.runtime.handler import Handlers
    from windlass.runtime.verify.handler_hooks import HandlerWrapper, HookContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrumentation:
    """What a proof asks of a run; a run for its own sake has none."""

    fault: str | None = None
    """What is spoiled, of `FAULTS`; None for nothing."""

    def command_options(self) -> list[str]:
        """The same for the command that starts a device."""
        return ["--notes", *(() if self.fault is None else ("--fault", self.fault))]

    def handler_wrapper(self, folder: Path, device: int) -> "HandlerWrapper":
        """What stands around the handlers of a device.

        Args:
            folder: of the run, where notes go.
            device: of the run.
        """
        from windlass.runtime.verify.activation_fingerprints import ActivationFingerprints
        from windlass.runtime.verify.fault_injection import inject_fault

        notes = ActivationFingerprints(folder, device)

        def both(handlers: "Handlers", inside: "HookContext") -> "Handlers":
            if self.fault is not None:
                handlers = inject_fault(self.fault, handlers, inside)
            return notes.wrap(handlers, inside)

        return both
