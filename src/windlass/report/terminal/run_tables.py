"""Tables of runs: the list of all runs, and one run compared with its prediction."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import (
    describe_batch,
    describe_coord,
    describe_graph,
    describe_parallelism,
    describe_precision,
    format_held_out_loss,
    format_loss,
    format_ratio,
    format_speed,
)
from windlass.report.predicted_vs_measured import (
    headline_metrics,
    rank_step_times,
    seconds_by_kind,
    step_time_notes,
)
from windlass.report.terminal.tables import OUTSIDE_STYLE, bar, fact_table
from windlass.tracking import RunRecord, RunSummary
from windlass.units import format_bytes, format_seconds

_RANK_LINES = 16
_WIDE = 100
"""Columns from which on the list of runs has a column of what differs."""
_DIFFERENCE_CELLS = 18
_STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip


def runs_table(runs: Sequence[RunSummary], now: float) -> RenderableType:
    """One row for each run; a column, or below 100 columns a list, says what differs among them.

    Args:
        runs: summaries, in this order.
        now: seconds since 1970, to show how long ago each run began.
    """
    return _RunsTable(runs, now)


class _RunsTable:
    """The list of runs as wide as there is room for."""

    def __init__(self, runs: Sequence[RunSummary], now: float) -> None:
        self._runs = runs
        self._now = now
        differences = _differences([run.settings() for run in runs])
        self._differences = [
            ", ".join(filter(None, (run.parent and f"from {run.parent}", words)))
            for run, words in zip(runs, differences, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the table."""
        del console
        wide = options.max_width >= _WIDE
        yield self._table(with_differences=wide and any(self._differences))
        if not wide and any(self._differences):
            below = fact_table()
            for run, words in zip(self._runs, self._differences, strict=True):
                below.add_row(run.short_id, Text(words or "–"))
            yield Text("what differs", style="bold")
            yield below

    def _table(self, *, with_differences: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("run", no_wrap=True)
        table.add_column("model", overflow="ellipsis", no_wrap=True, min_width=8)
        table.add_column("state", no_wrap=True)
        for name in ("step", "loss", "held out", "step time", "ratio", "ago"):
            table.add_column(name, justify="right", no_wrap=True)
        if with_differences:
            table.add_column("what differs", overflow="fold", min_width=_DIFFERENCE_CELLS)
        for run, words in zip(self._runs, self._differences, strict=True):
            table.add_row(*self._cells(run), *([Text(words)] if with_differences else []))
        return table

    def _cells(self, run: RunSummary) -> Iterator[str | Text]:
        ratio = run.seconds / run.predicted_seconds if run.predicted_seconds else None
        steps = f"/{run.steps}" if run.steps else ""
        yield run.short_id
        yield Text(run.model)
        yield Text(run.state, style=_STATE_COLOURS[run.state])
        yield f"{run.step}{steps}"
        yield format_loss(run.loss) if run.step else "–"
        yield "–" if run.held_out_loss is None else format_loss(run.held_out_loss)
        yield format_seconds(run.seconds) if math.isfinite(run.seconds) else "–"
        yield Text(format_ratio(ratio), style=OUTSIDE_STYLE if run.outside_interval else "")
        yield _ago(self._now - run.started)


def _differences(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """For each run its values that most of the runs do not have, in short words."""
    keys = dict.fromkeys(key for one in settings for key in one)
    usual = {key: Counter(one.get(key) for one in settings).most_common(1)[0][0] for key in keys}
    different = [key for key in keys if any(one.get(key) != usual[key] for one in settings)]
    names = Counter(key.rpartition(".")[2] for key in different)
    short = {
        key: key.rpartition(".")[2] if names[key.rpartition(".")[2]] == 1 else key
        for key in different
    }
    return [
        ", ".join(
            f"{short[key]}={one[key]}" if key in one else f"no {short[key]}"
            for key in different
            if one.get(key) != usual[key]
        )
        for one in settings
    ]


def record_table(record: RunRecord) -> RenderableType:
    """One run: its facts, then predicted and measured numbers with their ratio."""
    table = fact_table()
    state = Text(record.state, style=_STATE_COLOURS[record.state])
    table.add_row("run", Text(f"{record.id}  ") + state)
    table.add_row("folder", Text(str(record.folder), overflow="fold"))
    if record.events:
        started = datetime.fromtimestamp(record.events[0].time, tz=UTC)
        more = f", attempt {record.attempts}" if record.attempts > 1 else ""
        table.add_row("started", started.strftime("%Y-%m-%d %H:%M UTC") + more)
    if record.parent is not None:
        table.add_row("started from", f"run {record.parent}")
    if record.graph is not None:
        table.add_row("model", Text(describe_graph(record.graph)))
    if record.plan is not None:
        several = record.plan.parallel.devices > 1
        parallelism = f"{describe_parallelism(record.plan)}; " if several else ""
        words = f"{parallelism}{describe_batch(record.plan)}; {describe_precision(record.plan)}"
        table.add_row("plan", words)
    if record.steps:
        requested = record.request.train.steps if record.request else record.meta.get("steps", "?")
        table.add_row("steps", f"{record.steps[-1].step} of {requested}")
        first, last = record.steps[0], record.steps[-1]
        table.add_row(
            "loss", f"{format_loss(first.loss)} → {format_loss(last.loss)} nats per token"
        )
    held_out = [step for step in record.steps if step.held_out_loss is not None]
    if held_out:
        table.add_row(
            "held out", f"{format_held_out_loss(held_out[-1])}, at step {held_out[-1].step}"
        )
    for fault in record.faults:
        table.add_row(Text("fault", style="red"), Text(fault))
    notes = step_time_notes(record.current_plan_steps, record.prediction)
    lines = (Text(note, style="yellow") for note in notes)
    return Group(table, _comparison(record), *lines, *_ranks(record))


def _comparison(record: RunRecord) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    metrics = headline_metrics(record.current_plan_steps, record.prediction)
    formats: Mapping[str, Callable[[float], str]] = {
        "seconds": format_seconds, "tokens": format_speed, "mfu": _percent, "memory": format_bytes,
        "read": format_bytes, "written": format_bytes,
    }  # fmt: skip
    rows = [(metrics[key], show) for key, show in formats.items() if key in metrics]
    metric_rows = len(rows)
    rows += [
        (pair, format_seconds)
        for pair in seconds_by_kind(record.current_plan_steps, record.prediction)
    ]
    for index, (pair, show) in enumerate(rows):
        table.add_row(
            pair.name if index < metric_rows else f"  {pair.name}",
            "–" if pair.predicted is None else show(pair.predicted),
            "–" if pair.measured is None else show(pair.measured),
            Text(format_ratio(pair.ratio), style=OUTSIDE_STYLE if pair.outside_interval else ""),
            end_section=index == metric_rows - 1,
        )
    return table


def _ranks(record: RunRecord) -> Iterator[RenderableType]:
    """One row for each rank, for the first ones if there are many; nothing on a single device."""
    if record.plan is None or not record.steps_by_rank:
        return
    parallel = record.plan.parallel
    times = rank_step_times(record.steps_by_rank, parallel)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank")
    table.add_column("position")
    for name in ("busy", "waiting", "peak memory"):
        table.add_column(name, justify="right")
    table.add_column("busy share of the step", style="cyan", no_wrap=True)
    for time in times[:_RANK_LINES]:
        step_seconds = time.busy_seconds + time.waiting_seconds
        table.add_row(
            str(time.rank),
            describe_coord(time.coord, parallel),
            format_seconds(time.busy_seconds),
            format_seconds(time.waiting_seconds),
            "–" if time.memory_bytes is None else format_bytes(time.memory_bytes),
            bar(time.busy_seconds / step_seconds if step_seconds else 0.0),
        )
    yield table
    if len(times) > _RANK_LINES:
        yield Text(f"and {len(times) - _RANK_LINES} more ranks, on the page")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ago(seconds: float) -> str:
    """`3 h`: whole units, for a narrow column."""
    if not math.isfinite(seconds):
        return "–"
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return f"{max(0, int(seconds))} s"
