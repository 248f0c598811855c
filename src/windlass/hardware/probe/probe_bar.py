"""How far a measurement is."""

from collections.abc import Callable

ProbeProgress = Callable[[str, int, int | None], None]
"""Receives what is being measured, the number of finished measurements and their total."""


class ProbeBar:
    """Reports each measurement.

    Args:
        progress: called with each; None for no reports.
        measurements: about how many there are.
    """

    def __init__(self, progress: ProbeProgress | None, measurements: int) -> None:
        self._progress, self._measurements = progress, measurements
        self._label = ""
        self._done = 0

    def label(self, label: str) -> None:
        """Names what is measured next."""
        self._label = label
        self._report()

    def step(self) -> None:
        """One more is measured."""
        self._done = min(self._done + 1, self._measurements - 1)
        self._report()

    def end(self) -> None:
        """All are measured."""
        self._done = self._measurements
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(f"measuring {self._label}", self._done, self._measurements)
