"""Plans, predictions and runs as tables for a terminal; every forecast says predicted."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import (
    describe_batch,
    parallel_degrees,
    describe_parallelism,
    describe_traffic,
    describe_graph,
    format_held_out_loss,
    format_loss,
    format_mfu,
    describe_phases,
    describe_coord,
    describe_precision,
    format_ratio,
    describe_recompute,
    describe_sharding,
    format_speed,
    offloads_only_optimizer,
    describe_optimizer_offload,
    describe_writes,
)
from windlass.report.predicted_vs_measured import headline_metrics, seconds_by_kind, rank_step_times
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction, TierPeak
from windlass.tracking import RunRecord, RunSummary
from windlass.units import format_bytes, format_seconds

_BAR_CELLS = 20
_DEVICE_LINES = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip


def plan_table(plan: Plan, graph: Graph | None = None) -> RenderableType:
    """A plan in words, a line for each of its parts."""
    table = fact_table()
    if graph is not None:
        table.add_row("model", Text(describe_graph(graph)))
    table.add_row("machine", Text(plan.machine.partition("@")[0]))
    table.add_row("cut", describe_parallelism(plan))
    if plan.parallel.pipeline > 1:
        chunks = (
            f", {plan.parallel.virtual_stages} chunks to a stage"
            if plan.parallel.virtual_stages > 1
            else ""
        )
        table.add_row("order", f"{plan.parallel.schedule}{chunks}")
    if plan.parallel.data > 1:
        table.add_row("sharding", describe_sharding(plan))
    table.add_row("batch", describe_batch(plan))
    table.add_row("precision", describe_precision(plan))
    table.add_row("activations", describe_recompute(plan))
    table.add_row("phases", describe_phases(plan))
    return table


def prediction_table(
    prediction: Prediction, *, plan: Plan | None = None, steps: int = 1
) -> RenderableType:
    """Predicted step time by term and instruction kind, and memory by class at the peak moment.

    Args:
        prediction: of one step.
        plan: names the tiers that a run wears; None leaves that out.
        steps: of the run.
    """
    table = fact_table()
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    step = format_seconds(prediction.step_seconds)
    table.add_row("predicted step", f"{step}, 80 % interval {low} to {high}")
    table.add_row("predicted speed", format_speed(prediction.tokens_per_second))
    table.add_row("predicted MFU", format_mfu(prediction, prediction.step_seconds))
    if prediction.compile_seconds:
        table.add_row("predicted compile", f"{format_seconds(prediction.compile_seconds)}, once")
    if prediction.offload is not None:
        table.add_row("predicted traffic", describe_traffic(prediction))
        if plan is not None:
            table.add_row("predicted wear", describe_writes(plan, prediction, steps))
    parts: list[RenderableType] = [table]
    parts.append(_shares("predicted step time by term", prediction.by_term, format_seconds))
    parts.append(_shares("predicted step time by instruction", prediction.by_kind, format_seconds))
    # Further tiers only where something is kept in them.
    near, *others = prediction.peaks
    parts += [_peak(peak) for peak in (near, *(peak for peak in others if peak.peak_bytes))]
    blank = Text()
    return Group(*(item for part in parts for item in (part, blank)))


def runners_up_table(runners_up: Sequence[tuple[Plan, Prediction | None, str]]) -> RenderableType:
    """Plans that lost, and why.

    Args:
        others: plan, its prediction if it got one, and the reason in words.
    """
    table = Table(
        box=box.SIMPLE_HEAD, title="runners-up, all numbers predicted", title_justify="left",
        title_style="bold", pad_edge=False,
    )  # fmt: skip
    table.add_column("plan")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    for plan, prediction, reason in runners_up:
        peak = prediction.peaks[0].peak_bytes if prediction and prediction.peaks else None
        table.add_row(
            Text(describe_plan_briefly(plan)),
            format_seconds(prediction.step_seconds) if prediction else "–",
            format_bytes(peak) if peak is not None else "–",
            Text(reason),
        )
    return table


def describe_plan_briefly(plan: Plan) -> str:
    """`4 × 4 × 256, bfloat16, compiled, recompute`: a plan in a table's cell."""
    size = f"{plan.batch.accumulation} × {plan.batch.micro} × {plan.batch.sequence}"
    parts = [size, plan.precision]
    if plan.parallel.devices > 1:
        parts.insert(0, parallel_degrees(plan))
    elif offloads_only_optimizer(plan):
        parts.append(describe_optimizer_offload(plan))
    parts += [] if plan.moments == "float32" else [f"{plan.moments} moments"]
    parts += ["compiled"] if plan.compile else []
    parts += ["recompute"] if plan.recompute == "full" else []
    return ", ".join(parts)


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
        table.add_row("held out", f"{format_held_out_loss(held_out[-1])}, at step {held_out[-1].step}")
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
    rows += [(pair, format_seconds) for pair in seconds_by_kind(record.current_plan_steps, record.prediction)]
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
    for each in found[:_DEVICE_LINES]:
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
    if len(found) > _DEVICE_LINES:
        yield Text(f"and {len(found) - _DEVICE_LINES} devices more, on the page")


def _peak(peak: TierPeak) -> RenderableType:
    over = f", {format_bytes(peak.over_bytes)} too much" if peak.over_bytes else ""
    name = (
        f"predicted peak in {peak.tier}: {format_bytes(peak.peak_bytes)} "
        f"of {format_bytes(peak.capacity_bytes)}{over}"
    )
    return _shares(name, {str(k): float(v) for k, v in peak.by_class.items()}, format_bytes)


def _shares(name: str, parts: Mapping[str, float], show: Callable[[float], str]) -> Group:
    """Parts of a whole, the largest first, with bars; what is nothing is left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=16)
    table.add_column(justify="right", width=9, no_wrap=True)
    table.add_column(justify="right", width=5)
    table.add_column(style="cyan", no_wrap=True)
    total = sum(parts.values()) or 1.0
    for part, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size > 0:
            table.add_row(Text(part), show(size), f"{100 * size / total:.0f} %", bar(size / total))
    return Group(Text(name, style="bold"), table)


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """A bar of block characters, to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def fact_table() -> Table:
    """An empty table of two columns: a name, and words."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


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
