"""Tables of runs for a terminal: the list of runs, and one run beside its prediction."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Group, RenderableType
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
from windlass.report.predicted_vs_measured import headline_metrics, rank_step_times, seconds_by_kind
from windlass.report.terminal.tables import bar, fact_table
from windlass.tracking import RunRecord, RunSummary
from windlass.units import format_bytes, format_seconds

_RANK_LINES = 16
_STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip


def runs_table(runs: Sequence[RunSummary], now: float) -> RenderableType:
    """A line for each run.

    Args:
        runs: in the order they are shown.
        now: seconds since 1970, to say how long ago each began.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True, min_width=8)
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "held out", "step time", "ratio", "ago"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        ratio = run.seconds / run.predicted_seconds if run.predicted_seconds else None
        steps = f"/{run.steps}" if run.steps else ""
        table.add_row(
            run.short_id,
            Text(run.model),
            Text(run.state, style=_STATE_COLOURS[run.state]),
            f"{run.step}{steps}",
            format_loss(run.loss) if run.step else "–",
            "–" if run.held_out_loss is None else format_loss(run.held_out_loss),
            format_seconds(run.seconds) if math.isfinite(run.seconds) else "–",
            format_ratio(ratio),
            _ago(now - run.started),
        )
    return table


def record_table(record: RunRecord) -> RenderableType:
    """One run: what it is, and predicted beside measured with their ratio."""
    table = fact_table()
    state = Text(record.state, style=_STATE_COLOURS[record.state])
    table.add_row("run", Text(f"{record.id}  ") + state)
    table.add_row("folder", Text(str(record.folder), overflow="fold"))
    if record.events:
        begun = datetime.fromtimestamp(record.events[0].time, tz=UTC)
        more = f", attempt {record.attempts}" if record.attempts > 1 else ""
        table.add_row("begun", begun.strftime("%Y-%m-%d %H:%M UTC") + more)
    if record.graph is not None:
        table.add_row("model", Text(describe_graph(record.graph)))
    if record.plan is not None:
        cut = f"{describe_parallelism(record.plan)}; " if record.plan.parallel.devices > 1 else ""
        words = f"{cut}{describe_batch(record.plan)}; {describe_precision(record.plan)}"
        table.add_row("plan", words)
    if record.steps:
        asked = record.request.train.steps if record.request else record.meta.get("steps", "?")
        table.add_row("steps", f"{record.steps[-1].step} of {asked}")
        first, last = record.steps[0], record.steps[-1]
        table.add_row("loss", f"{format_loss(first.loss)} → {format_loss(last.loss)} nats a token")
    held_out = [step for step in record.steps if step.held_out_loss is not None]
    if held_out:
        table.add_row(
            "held out", f"{format_held_out_loss(held_out[-1])}, at step {held_out[-1].step}"
        )
    for fault in record.faults:
        table.add_row(Text("fault", style="red"), Text(fault))
    parts = [table, _compared(record), *_devices(record)]
    return Group(*parts)


def _compared(record: RunRecord) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    heads = headline_metrics(record.current_plan_steps, record.prediction)
    shows: Mapping[str, Callable[[float], str]] = {
        "seconds": format_seconds, "tokens": format_speed, "mfu": _percent, "memory": format_bytes,
        "read": format_bytes, "written": format_bytes,
    }  # fmt: skip
    rows = [(heads[key], show) for key, show in shows.items() if key in heads]
    whole = len(rows)
    rows += [
        (pair, format_seconds)
        for pair in seconds_by_kind(record.current_plan_steps, record.prediction)
    ]
    for index, (pair, show) in enumerate(rows):
        table.add_row(
            pair.name if index < whole else f"  {pair.name}",
            "–" if pair.predicted is None else show(pair.predicted),
            "–" if pair.measured is None else show(pair.measured),
            format_ratio(pair.ratio),
            end_section=index == whole - 1,
        )
    return table


def _devices(record: RunRecord) -> Iterator[RenderableType]:
    """A line for each device of several; of very many, for the first."""
    if record.plan is None or not record.steps_by_rank:
        return
    cut = record.plan.parallel
    found = rank_step_times(record.steps_by_rank, cut)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device")
    table.add_column("place")
    for name in ("busy", "waits", "peak memory"):
        table.add_column(name, justify="right")
    table.add_column("busy of its step", style="cyan", no_wrap=True)
    for each in found[:_RANK_LINES]:
        whole = each.busy_seconds + each.waiting_seconds
        table.add_row(
            str(each.rank),
            describe_coord(each.coord, cut),
            format_seconds(each.busy_seconds),
            format_seconds(each.waiting_seconds),
            "–" if each.memory_bytes is None else format_bytes(each.memory_bytes),
            bar(each.busy_seconds / whole if whole else 0.0),
        )
    yield table
    if len(found) > _RANK_LINES:
        yield Text(f"and {len(found) - _RANK_LINES} devices more, on the page")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ago(seconds: float) -> str:
    """`3 h`: whole units only, for a narrow column."""
    if not math.isfinite(seconds):
        return "–"
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return f"{max(0, int(seconds))} s"
