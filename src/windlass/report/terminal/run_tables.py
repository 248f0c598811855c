"""Tables of one run beside its prediction, and of what differs between several."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.judge import RunDiff
from windlass.report.formatting import (
    describe_batch,
    describe_coord,
    describe_dropped,
    describe_graph,
    describe_loss_scale,
    describe_parallelism,
    describe_precision,
    format_held_out_loss,
    format_loss,
    format_ratio,
    format_speed,
    format_task_scores,
)
from windlass.report.predicted_vs_measured import (
    headline_metrics,
    prediction_notes,
    rank_step_times,
    seconds_by_kind,
)
from windlass.report.run_differences import input_line, key_rows, result_rows
from windlass.report.terminal.tables import OUTSIDE_STYLE, STATE_COLOURS, bar, fact_table
from windlass.schema import Step
from windlass.sparsity import describe_legs
from windlass.tracking import RunRecord, main_series, read_series
from windlass.units import format_bytes, format_seconds

_RANK_LINES = 16


def record_table(record: RunRecord) -> RenderableType:
    """One run: its facts, then predicted and measured numbers with their ratio."""
    table = fact_table()
    state = Text(record.state, style=STATE_COLOURS[record.state])
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
        batch = describe_batch(record.plan, record.graph)
        words = f"{parallelism}{batch}; {describe_precision(record.plan)}"
        table.add_row("plan", words)
    if record.steps:
        requested = record.request.train.steps if record.request else record.meta.get("steps", "?")
        table.add_row("steps", f"{record.steps[-1].step} of {requested}")
        if record.request is not None and isinstance(requested, int):
            for words in describe_legs(record.request.sparsity, requested):
                table.add_row("", words)
        table.add_row(*_main_result(record))
    for name, words in _results(record):
        table.add_row(name, words)
    for fault in record.faults:
        table.add_row(Text("fault", style="red"), Text(fault))
    notes = prediction_notes(record.current_plan_steps, record.prediction)
    lines = (Text(note, style="yellow") for note in notes)
    return Group(table, _comparison(record), *lines, *_ranks(record))


def run_diff_table(found: RunDiff) -> RenderableType:
    """One sentence on the inputs, the keys that differ, and the results beside the noise floor."""
    names = [run.short_id for run in found.runs]
    parts: list[RenderableType] = [Text(f"{input_line(found)}.", style="bold")]
    keys = list(key_rows(found))
    if keys:
        parts.append(_columns(("input", "key", *names), keys))
    results = list(result_rows(found))
    if results:
        parts.append(_columns(("result", *names, f"{names[-1]} beside {names[0]}"), results))
    return Group(*parts)


def _main_result(record: RunRecord) -> tuple[str, str]:
    """First and last loss, or those of what a loop of the user's own logs first."""
    losses = [step.loss for step in record.steps]
    if all(map(math.isnan, losses)):
        series = read_series(record.folder)
        name = main_series(series)
        if name not in (None, "loss"):
            values = series[name].values
            return name, f"{values[0]:.6g} → {values[-1]:.6g}"
    return "loss", f"{format_loss(losses[0])} → {format_loss(losses[-1])} nats per token"


def _results(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What some runs have beside their loss: held-out loss, scores of tasks, loss scale."""
    steps = record.steps
    if held_out := [step for step in steps if step.held_out_loss is not None]:
        yield "held out", f"{format_held_out_loss(held_out[-1])}, at step {held_out[-1].step}"
        entropy = record.meta.get("unigram_entropy")
        if isinstance(entropy, int | float):
            yield "", f"{entropy:.3f} by how often each token occurs, and no more"
    if scored := [step for step in steps if step.task_scores]:
        yield "tasks", f"{format_task_scores(scored[-1])}, at step {scored[-1].step}"
    if steps and (scaled := describe_loss_scale(steps)):
        yield "loss scale", scaled


def _comparison(record: RunRecord) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    metrics = headline_metrics(record.current_plan_steps, record.prediction)
    unit = record.prediction.unit if record.prediction else None
    formats: Mapping[str, Callable[[float], str]] = {
        "seconds": format_seconds, "tokens": partial(format_speed, unit=unit), "mfu": _percent,
        "memory": format_bytes, "read": format_bytes, "written": format_bytes,
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
    table.add_column("busy share of the step")
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


def _columns(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 64
"""Most bars of a row; of more experts each bar is the busiest of a few."""


def expert_table(steps: Sequence[Step]) -> RenderableType | None:
    """The load of each expert in the last step that recorded it; None if none did."""
    step = next((step for step in reversed(steps) if step.expert_load), None)
    if step is None:
        return None
    table = Table(box=None, pad_edge=False)
    for heading in (f"experts, step {step.step}", "least to most", "load of each"):
        table.add_column(heading)
    for name, load in step.expert_load.items():
        mean = sum(load) / len(load)
        shares = [count / mean if mean else 0.0 for count in load]
        table.add_row(name, f"{min(shares):.2f} to {max(shares):.2f} ×", _bars(shares))
    return Group(table, Text(describe_expert_load(step)))


def describe_expert_load(step: Step) -> str:
    """`experts: the busiest, of block2, got 1.82 × an equal share; 3 of 32 got no token`.

    It also says how many choices found no room, where experts have a capacity.

    Args:
        step: a step with `expert_load`.
    """
    ratios = {
        name: max(load) * len(load) / max(1, sum(load)) for name, load in step.expert_load.items()
    }
    busiest = max(ratios, key=lambda name: ratios[name])
    loads = [count for load in step.expert_load.values() for count in load]
    idle = f"; {loads.count(0)} of {len(loads)} got no token" if 0 in loads else ""
    layer = busiest.partition(".")[0]
    dropped = f"; {described}" if (described := describe_dropped(step)) else ""
    busy = f"the busiest, of {layer}, got {ratios[busiest]:.2f} × an equal share"
    return f"experts: {busy}{idle}{dropped}"


def _bars(shares: Sequence[float]) -> str:
    """A bar for each expert, full at twice an equal share."""
    width = -(-len(shares) // _COLUMNS)
    tops = [max(shares[start : start + width]) for start in range(0, len(shares), width)]
    return "".join(_BARS[min(len(_BARS) - 1, int(top / 2 * len(_BARS)))] for top in tops)
