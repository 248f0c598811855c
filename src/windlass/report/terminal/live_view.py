"""The live view of a run: a display for a terminal, or plain lines for a file or a pipe."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import (
    describe_contention,
    describe_dropped,
    describe_loss_scale,
    format_held_out_loss,
    format_loss,
    format_mfu,
    format_ratio,
    format_speed,
    format_task_scores,
)
from windlass.report.predicted_vs_measured import device_memory_peak, most_memory_bytes
from windlass.report.terminal.tables import OUTSIDE_STYLE
from windlass.schema import Prediction, Step
from windlass.units import format_bytes, format_seconds

_RECENT = 30
"""Number of recent steps whose median is the current step time."""
_CURVE_CELLS = 24
_BLOCKS = "▁▂▃▄▅▆▇█"


class TrainingView:
    """The state of a run as a rich renderable; call `update` with each step.

    Args:
        prediction: the prediction to compare with; None if there is none.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        prediction: Prediction | None,
        earlier_steps: tuple[Step, ...] = (),
    ) -> None:
        self._name = name
        self._begun = time.monotonic()
        self._spinner = Spinner("dots", style="cyan")
        self._steps = steps
        self._prediction = prediction
        self._losses = [step.loss for step in earlier_steps]
        self._seconds: list[float] = []
        self._contention: list[float] = []
        self._traffic_bytes: list[tuple[int, int]] = []
        self._last: Step | None = earlier_steps[-1] if earlier_steps else None
        self._evaluated = next(
            (step for step in reversed(earlier_steps) if step.held_out_loss is not None), None
        )
        self._scored = next((step for step in reversed(earlier_steps) if step.task_scores), None)
        self._saved = next(
            (step.saved for step in reversed(earlier_steps) if step.saved is not None), None
        )

    def begin_leg(self, prediction: Prediction) -> None:
        """Goes on under another plan of the run, with whose prediction steps are compared now."""
        self._prediction = prediction
        self._seconds, self._contention, self._traffic_bytes = [], [], []

    def update(self, step: Step) -> None:
        """Adds a step."""
        # The first step of an attempt also compiles; it counts only until there is a second.
        if len(self._seconds) == 1 and self._seconds[0] > 1.5 * step.seconds:
            self._seconds.clear()
            self._contention.clear()
        self._seconds = [*self._seconds[-_RECENT + 1 :], step.seconds]
        if step.contention is not None:
            self._contention = [*self._contention[-_RECENT + 1 :], step.contention]
        self._traffic_bytes = [
            *self._traffic_bytes[-_RECENT + 1 :],
            (step.read_bytes, step.written_bytes),
        ]
        self._losses.append(step.loss)
        self._last = step
        self._evaluated = step if step.held_out_loss is not None else self._evaluated
        self._scored = step if step.task_scores else self._scored
        self._saved = step.saved or self._saved

    @property
    def _unit(self) -> str | None:
        """What the tokens of a step are if they are none."""
        return self._prediction.unit if self._prediction else None

    @property
    def step_seconds(self) -> float | None:
        """Median of recent steps, or the predicted time before the first; None without either."""
        if self._seconds:
            return median(self._seconds)
        return self._prediction.step_seconds if self._prediction else None

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated seconds until the last step; None while the step time is unknown."""
        done = self._last.step if self._last else 0
        seconds = self.step_seconds
        return None if seconds is None else max(0, self._steps - done) * seconds

    def line(self) -> str:
        """The latest step in one line, for output other than a terminal."""
        step, seconds = self._last, self.step_seconds
        if step is None or seconds is None:
            return f"step 0/{self._steps}"
        parts = [
            f"step {step.step}/{self._steps}",
            f"loss {format_loss(step.loss)}",
            format_speed(step.tokens / seconds, self._unit),
            f"{format_seconds(seconds)}/step",
        ]
        if self._prediction is not None:
            parts.append(f"{format_ratio(seconds / self._prediction.step_seconds)} predicted")
        remarks = (
            self._memory_remark(step),
            f"held out {format_held_out_loss(step)}" if step.held_out_loss is not None else "",
            format_task_scores(step) if step.task_scores else "",
            f"saved {step.saved}" if step.saved is not None else "",
            describe_dropped(step),
            f"loss scale {scaled}" if (scaled := describe_loss_scale([step])) else "",
            self._busy(),
        )
        parts += filter(None, remarks)
        if self.remaining_seconds:
            parts.append(f"{format_seconds(self.remaining_seconds)} left")
        return ", ".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the display; below 60 columns only the most important rows."""
        yield self._bar()
        yield self._numbers(narrow=options.max_width < 60)

    def _bar(self) -> Group:
        done = self._last.step if self._last else 0
        remaining = self.remaining_seconds
        head = Table.grid(expand=True, padding=(0, 1, 0, 0))
        head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        head.add_column(justify="right", no_wrap=True)
        head.add_column(no_wrap=True)
        name = Text(self._name, style="bold")
        name.append(f"  step {done} of {self._steps}", style="not bold")
        tail = f"{100 * done // self._steps} %"
        if remaining:
            tail += f", {format_seconds(remaining)} left" if self._seconds else ""
        # A step may take minutes, and a display that stands still looks dead.
        head.add_row(name, tail, self._spinner if done < self._steps else "")
        # The bar needs a table around it: a bare bar does not end its line.
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
            words += f", {time.monotonic() - self._begun:.0f} s so far"
            return [("step", words)]
        loss = Text(f"{format_loss(step.loss)}  ").append(sparkline(self._losses), style="cyan")
        return [
            ("loss", loss),
            ("held out", self._held_out()),
            ("tasks", self._tasks()),
            ("speed", self._speed(step.tokens, seconds)),
            ("", Text(self._busy(), style="yellow")),
            ("MFU", format_mfu(prediction, seconds) if prediction else ""),
            ("experts", describe_dropped(step)),
            ("loss scale", describe_loss_scale([step])),
            ("memory", self._memory(step)),
            ("traffic", self._traffic()),
            ("saved", self._saved or ""),
        ]

    def _held_out(self) -> str:
        step = self._evaluated
        return f"{format_held_out_loss(step)} at step {step.step}" if step else ""

    def _tasks(self) -> str:
        step = self._scored
        return f"{format_task_scores(step)} at step {step.step}" if step else ""

    def _speed(self, tokens: int, seconds: float) -> Text:
        """Speed and step time; the ratio is coloured if it lies outside the interval."""
        speed = format_speed(tokens / seconds, self._unit)
        words = Text(f"{speed}, {format_seconds(seconds)} a step")
        prediction = self._prediction
        if prediction is None:
            return words
        inside = prediction.low_seconds <= seconds <= prediction.high_seconds
        words.append(", ").append(
            format_ratio(seconds / prediction.step_seconds), style="" if inside else OUTSIDE_STYLE
        )
        return words.append(f" predicted {format_seconds(prediction.step_seconds)}")

    def _busy(self) -> str:
        """A sentence about other processes on the cores lately; empty if there were none."""
        return describe_contention(fmean(self._contention) if self._contention else None)

    def _memory(self, step: Step) -> Text:
        words = Text(f"{format_bytes(step.memory_bytes)} at the peak")
        peak, limit = device_memory_peak(self._prediction), most_memory_bytes(self._prediction)
        if peak is None or limit is None:
            return words
        style = OUTSIDE_STYLE if step.memory_bytes > limit else ""
        words.append(", ").append(self._memory_ratio(step), style=style)
        return words.append(
            f" predicted {format_bytes(peak.peak_bytes)} of {format_bytes(peak.capacity_bytes)}"
        )

    def _memory_remark(self, step: Step) -> str:
        """Memory beside its prediction; empty unless it is more than that."""
        limit = most_memory_bytes(self._prediction)
        return (
            f"memory {self._memory_ratio(step)} predicted"
            if limit and step.memory_bytes > limit
            else ""
        )

    def _memory_ratio(self, step: Step) -> str:
        peak = device_memory_peak(self._prediction)
        return format_ratio(step.memory_bytes / peak.peak_bytes if peak else None)

    def _traffic(self) -> str:
        """Measured and predicted offload traffic; empty where nothing is offloaded."""
        offload = self._prediction.offload if self._prediction else None
        read, written = (median(sizes) for sizes in zip(*self._traffic_bytes, strict=True))
        if offload is None and not (read or written):
            return ""
        words = f"{format_bytes(read)} read and {format_bytes(written)} written a step"
        if offload is None:
            return words
        predicted = f"{format_bytes(offload.read_bytes)} and {format_bytes(offload.written_bytes)}"
        ratios = " and ".join(
            format_ratio(measured / predicted_bytes) if predicted_bytes else "–"
            for measured, predicted_bytes in (
                (read, offload.read_bytes),
                (written, offload.written_bytes),
            )
        )
        return f"{words}, {ratios} predicted {predicted}"


def sparkline(values: Sequence[float], cells: int = _CURVE_CELLS) -> str:
    """A line of block characters: means of finite values over equal spans."""
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers:
        return ""
    cells = min(cells, len(numbers))
    edges = [index * len(numbers) // cells for index in range(cells + 1)]
    # Halved, so that the difference of the largest floats does not overflow.
    means = [fmean(numbers[low:high]) / 2 for low, high in pairwise(edges)]
    low, spread = min(means), max(means) - min(means)
    if spread == 0:
        return _BLOCKS[0] * cells
    return "".join(_BLOCKS[round((mean - low) / spread * (len(_BLOCKS) - 1))] for mean in means)
