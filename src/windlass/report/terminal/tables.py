"""Plans, predictions and runs as tables for a terminal; every forecast says predicted."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import (
    batch_words,
    cut_letters,
    cut_words,
    far_words,
    graph_words,
    held_out_words,
    loss_words,
    mfu_words,
    phase_words,
    place_words,
    precision_words,
    ratio_words,
    recompute_words,
    sharing_words,
    speed_words,
    state_away,
    state_words,
    wear_words,
)
from windlass.report.predicted_vs_measured import headlines, kinds, shares
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction, TierPeak
from windlass.tracking import Record, RunSummary
from windlass.units import show_bytes, show_seconds

_BAR_CELLS = 20
_DEVICE_LINES = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STATE_COLOURS = {
    "prepared": "blue", "running": "cyan", "finished": "green", "interrupted": "yellow",
    "killed": "yellow", "broken": "red",
}  # fmt: skip


def plan_table(plan: Plan, graph: Graph | None = None) -> RenderableType:
    """A plan in words, a line for each of its parts."""
    table = facts()
    if graph is not None:
        table.add_row("model", Text(graph_words(graph)))
    table.add_row("machine", Text(plan.machine.partition("@")[0]))
    table.add_row("cut", cut_words(plan))
    if plan.parallel.pipeline > 1:
        chunks = (
            f", {plan.parallel.virtual_stages} chunks to a stage"
            if plan.parallel.virtual_stages > 1
            else ""
        )
        table.add_row("order", f"{plan.parallel.schedule}{chunks}")
    if plan.parallel.data > 1:
        table.add_row("sharding", sharing_words(plan))
    table.add_row("batch", batch_words(plan))
    table.add_row("precision", precision_words(plan))
    table.add_row("activations", recompute_words(plan))
    table.add_row("phases", phase_words(plan))
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
    table = facts()
    low, high = show_seconds(prediction.low_seconds), show_seconds(prediction.high_seconds)
    step = show_seconds(prediction.step_seconds)
    table.add_row("predicted step", f"{step}, 80 % interval {low} to {high}")
    table.add_row("predicted speed", speed_words(prediction.tokens_per_second))
    table.add_row("predicted MFU", mfu_words(prediction, prediction.step_seconds))
    if prediction.compile_seconds:
        table.add_row("predicted compile", f"{show_seconds(prediction.compile_seconds)}, once")
    if prediction.offload is not None:
        table.add_row("predicted traffic", far_words(prediction))
        if plan is not None:
            table.add_row("predicted wear", wear_words(plan, prediction, steps))
    parts: list[RenderableType] = [table]
    parts.append(_shares("predicted step time by term", prediction.by_term, show_seconds))
    parts.append(_shares("predicted step time by instruction", prediction.by_kind, show_seconds))
    # Further tiers only where something is kept in them.
    near, *others = prediction.peaks
    parts += [_peak(peak) for peak in (near, *(peak for peak in others if peak.peak_bytes))]
    blank = Text()
    return Group(*(item for part in parts for item in (part, blank)))


def runners_up_table(others: Sequence[tuple[Plan, Prediction | None, str]]) -> RenderableType:
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
    for plan, prediction, reason in others:
        peak = prediction.peaks[0].peak_bytes if prediction and prediction.peaks else None
        table.add_row(
            Text(short_words(plan)),
            show_seconds(prediction.step_seconds) if prediction else "–",
            show_bytes(peak) if peak is not None else "–",
            Text(reason),
        )
    return table


def short_words(plan: Plan) -> str:
    """`4 × 4 × 256, bfloat16, compiled, recompute`: a plan in a table's cell."""
    size = f"{plan.batch.accumulation} × {plan.batch.micro} × {plan.batch.sequence}"
    parts = [size, plan.precision]
    if plan.parallel.devices > 1:
        parts.insert(0, cut_letters(plan))
    elif state_away(plan):
        parts.append(state_words(plan))
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
            loss_words(run.loss) if run.step else "–",
            "–" if run.held_out_loss is None else loss_words(run.held_out_loss),
            show_seconds(run.seconds) if math.isfinite(run.seconds) else "–",
            ratio_words(ratio),
            _ago(now - run.started),
        )
    return table


def record_table(record: Record) -> RenderableType:
    """One run: what it is, and predicted beside measured with their ratio."""
    table = facts()
    state = Text(record.state, style=_STATE_COLOURS[record.state])
    table.add_row("run", Text(f"{record.id}  ") + state)
    table.add_row("folder", Text(str(record.folder), overflow="fold"))
    if record.events:
        begun = datetime.fromtimestamp(record.events[0].time, tz=UTC)
        more = f", attempt {record.attempts}" if record.attempts > 1 else ""
        table.add_row("begun", begun.strftime("%Y-%m-%d %H:%M UTC") + more)
    if record.graph is not None:
        table.add_row("model", Text(graph_words(record.graph)))
    if record.plan is not None:
        cut = f"{cut_words(record.plan)}; " if record.plan.parallel.devices > 1 else ""
        words = f"{cut}{batch_words(record.plan)}; {precision_words(record.plan)}"
        table.add_row("plan", words)
    if record.steps:
        asked = record.request.train.steps if record.request else record.meta.get("steps", "?")
        table.add_row("steps", f"{record.steps[-1].step} of {asked}")
        first, last = record.steps[0], record.steps[-1]
        table.add_row("loss", f"{loss_words(first.loss)} → {loss_words(last.loss)} nats a token")
    held_out = [step for step in record.steps if step.held_out_loss is not None]
    if held_out:
        table.add_row("held out", f"{held_out_words(held_out[-1])}, at step {held_out[-1].step}")
    for fault in record.faults:
        table.add_row(Text("fault", style="red"), Text(fault))
    parts = [table, _compared(record), *_devices(record)]
    return Group(*parts)


def _compared(record: Record) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    heads = headlines(record.current, record.prediction)
    shows: Mapping[str, Callable[[float], str]] = {
        "seconds": show_seconds, "tokens": speed_words, "mfu": _percent, "memory": show_bytes,
        "read": show_bytes, "written": show_bytes,
    }  # fmt: skip
    rows = [(heads[key], show) for key, show in shows.items() if key in heads]
    whole = len(rows)
    rows += [(pair, show_seconds) for pair in kinds(record.current, record.prediction)]
    for index, (pair, show) in enumerate(rows):
        table.add_row(
            pair.name if index < whole else f"  {pair.name}",
            "–" if pair.predicted is None else show(pair.predicted),
            "–" if pair.measured is None else show(pair.measured),
            ratio_words(pair.ratio),
            end_section=index == whole - 1,
        )
    return table


def _devices(record: Record) -> Iterator[RenderableType]:
    """A line for each device of several; of very many, for the first."""
    if record.plan is None or not record.devices:
        return
    cut = record.plan.parallel
    found = shares(record.devices, cut)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device")
    table.add_column("place")
    for name in ("busy", "waits", "peak memory"):
        table.add_column(name, justify="right")
    table.add_column("busy of its step", style="cyan", no_wrap=True)
    for each in found[:_DEVICE_LINES]:
        whole = each.busy_seconds + each.waiting_seconds
        table.add_row(
            str(each.device),
            place_words(each.place, cut),
            show_seconds(each.busy_seconds),
            show_seconds(each.waiting_seconds),
            "–" if each.memory_bytes is None else show_bytes(each.memory_bytes),
            bar(each.busy_seconds / whole if whole else 0.0),
        )
    yield table
    if len(found) > _DEVICE_LINES:
        yield Text(f"and {len(found) - _DEVICE_LINES} devices more, on the page")


def _peak(peak: TierPeak) -> RenderableType:
    over = f", {show_bytes(peak.over_bytes)} too much" if peak.over_bytes else ""
    name = (
        f"predicted peak in {peak.tier}: {show_bytes(peak.peak_bytes)} "
        f"of {show_bytes(peak.capacity_bytes)}{over}"
    )
    return _shares(name, {str(k): float(v) for k, v in peak.by_class.items()}, show_bytes)


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


def facts() -> Table:
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
