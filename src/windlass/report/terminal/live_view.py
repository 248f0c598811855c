"""A run while it runs: a display for a terminal, or plain lines for a file or a pipe."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import (
    format_held_out_loss,
    format_loss,
    format_mfu,
    format_ratio,
    format_speed,
)
from windlass.report.predicted_vs_measured import device_memory_peak
from windlass.schema.prediction import Prediction
from windlass.schema.run_record import Step
from windlass.units import format_bytes, format_seconds

_RECENT = 30
"""Steps whose median is the step time of the moment."""
_CURVE_CELLS = 24
_BLOCKS = "▁▂▃▄▅▆▇█"


class TrainingView:
    """The state of a run as a rich renderable; feed it each step.

    Args:
        name: the model's.
        steps: how many are asked for.
        prediction: to set the run beside; None if there is none.
        seen: steps of earlier attempts.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        prediction: Prediction | None,
        seen: tuple[Step, ...] = (),
    ) -> None:
        self._name = name
        self._steps = steps
        self._prediction = prediction
        self._losses = [step.loss for step in seen]
        self._seconds: list[float] = []
        self._moved: list[tuple[int, int]] = []
        self._last: Step | None = seen[-1] if seen else None
        self._evaluated = next((s for s in reversed(seen) if s.held_out_loss is not None), None)
        self._saved = next((s.saved for s in reversed(seen) if s.saved is not None), None)

    def update(self, step: Step) -> None:
        """Takes in a step."""
        # The first step of an attempt also compiles; it counts only until there is a second.
        if len(self._seconds) == 1 and self._seconds[0] > 1.5 * step.seconds:
            self._seconds.clear()
        self._seconds = [*self._seconds[-_RECENT + 1 :], step.seconds]
        self._moved = [*self._moved[-_RECENT + 1 :], (step.read_bytes, step.written_bytes)]
        self._losses.append(step.loss)
        self._last = step
        self._evaluated = step if step.held_out_loss is not None else self._evaluated
        self._saved = step.saved or self._saved

    @property
    def step_seconds(self) -> float | None:
        """The median of recent steps, before the first the predicted time; None if neither is."""
        if self._seconds:
            return median(self._seconds)
        return self._prediction.step_seconds if self._prediction else None

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the last step; None where nothing tells it."""
        done = self._last.step if self._last else 0
        seconds = self.step_seconds
        return None if seconds is None else max(0, self._steps - done) * seconds

    def line(self) -> str:
        """The latest step in one line, for output that is no terminal."""
        step, seconds = self._last, self.step_seconds
        if step is None or seconds is None:
            return f"step 0/{self._steps}"
        parts = [
            f"step {step.step}/{self._steps}",
            f"loss {format_loss(step.loss)}",
            f"{format_speed(step.tokens / seconds)}",
            f"{format_seconds(seconds)}/step",
        ]
        if self._prediction is not None:
            parts.append(f"{format_ratio(seconds / self._prediction.step_seconds)} predicted")
        if step.held_out_loss is not None:
            parts.append(f"held out {format_held_out_loss(step)}")
        if step.saved is not None:
            parts.append(f"saved {step.saved}")
        if self.remaining_seconds:
            parts.append(f"{format_seconds(self.remaining_seconds)} left")
        return ", ".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the display; below 60 columns only the most needed."""
        yield self._bar()
        yield self._numbers(narrow=options.max_width < 60)

    def _bar(self) -> Group:
        done = self._last.step if self._last else 0
        left = self.remaining_seconds
        head = Table.grid(expand=True)
        head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        head.add_column(justify="right", no_wrap=True)
        name = Text(self._name, style="bold")
        name.append(f"  step {done} of {self._steps}", style="not bold")
        tail = f"{100 * done // self._steps} %"
        if left:
            tail += f", {format_seconds(left)} left" if self._seconds else ""
        head.add_row(name, tail)
        # In a table of its own: a bare bar does not end its line.
        below = Table.grid(expand=True)
        below.add_row(ProgressBar(total=self._steps, completed=done, complete_style="cyan"))
        return Group(head, below)

    def _numbers(self, *, narrow: bool) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, words in self._rows():
            if words and not (narrow and name in ("MFU", "saved")):
                table.add_row(name, words)
        return table

    def _rows(self) -> list[tuple[str, str | Text]]:
        step, seconds, prediction = self._last, self.step_seconds, self._prediction
        if step is None or seconds is None or not self._seconds:
            words = "waiting for the first step"
            if prediction is not None:
                words += f", predicted {format_seconds(prediction.step_seconds)}"
                compiles = prediction.compile_seconds
                words += f" after {format_seconds(compiles)} of compiling" if compiles else ""
            return [("step", words)]
        loss = Text(f"{format_loss(step.loss)}  ").append(sparkline(self._losses), style="cyan")
        return [
            ("loss", loss),
            ("held out", self._held_out()),
            ("speed", f"{format_speed(step.tokens / seconds)}, {self._step_time(seconds)}"),
            ("MFU", format_mfu(prediction, seconds) if prediction else ""),
            ("memory", self._memory(step)),
            ("traffic", self._traffic()),
            ("saved", self._saved or ""),
        ]

    def _held_out(self) -> str:
        step = self._evaluated
        return f"{format_held_out_loss(step)} at step {step.step}" if step else ""

    def _step_time(self, seconds: float) -> str:
        words = f"{format_seconds(seconds)} a step"
        if self._prediction is None:
            return words
        predicted = self._prediction.step_seconds
        return f"{words}, {format_ratio(seconds / predicted)} predicted {format_seconds(predicted)}"

    def _memory(self, step: Step) -> str:
        words = f"{format_bytes(step.memory_bytes)} at the peak"
        peak = device_memory_peak(self._prediction)
        if peak is None:
            return words
        ratio = format_ratio(step.memory_bytes / peak.peak_bytes)
        return (
            f"{words}, {ratio} predicted {format_bytes(peak.peak_bytes)} "
            f"of {format_bytes(peak.capacity_bytes)}"
        )

    def _traffic(self) -> str:
        """What recent steps moved beside what was predicted; nothing where nothing moves."""
        far = self._prediction.offload if self._prediction else None
        read, written = (median(sizes) for sizes in zip(*self._moved, strict=True))
        if far is None and not (read or written):
            return ""
        words = f"{format_bytes(read)} read and {format_bytes(written)} written a step"
        if far is None:
            return words
        predicted = f"{format_bytes(far.read_bytes)} and {format_bytes(far.written_bytes)}"
        ratios = " and ".join(
            format_ratio(now / then) if then else "–"
            for now, then in ((read, far.read_bytes), (written, far.written_bytes))
        )
        return f"{words}, {ratios} predicted {predicted}"


def sparkline(values: Sequence[float], cells: int = _CURVE_CELLS) -> str:
    """A line of block characters: means over equal spans, lowest to highest; numbers only."""
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers:
        return ""
    cells = min(cells, len(numbers))
    edges = [index * len(numbers) // cells for index in range(cells + 1)]
    # Halved, so that their spread is a number however far they lie apart.
    means = [fmean(numbers[low:high]) / 2 for low, high in pairwise(edges)]
    low, spread = min(means), max(means) - min(means)
    if spread == 0:
        return _BLOCKS[0] * cells
    return "".join(_BLOCKS[round((mean - low) / spread * (len(_BLOCKS) - 1))] for mean in means)
