"""Tables of plans and predictions; everything predicted is labelled so."""

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import (
    describe_batch,
    describe_defaults,
    describe_graph,
    describe_optimizer_offload,
    describe_parallelism,
    describe_phases,
    describe_plan_recompute,
    describe_precision,
    describe_sections,
    describe_sharding,
    describe_speedup,
    describe_stack,
    describe_traffic,
    describe_writes,
    format_mfu,
    format_ratio,
    format_speed,
    offloads_only_optimizer,
    parallel_degrees,
)
from windlass.report.terminal.tables import bar, fact_table
from windlass.schema import (
    ChosenDefault,
    Graph,
    LargestModelRun,
    Plan,
    PredictedMeasured,
    Prediction,
    SparseSpeedup,
    TierPeak,
)
from windlass.units import format_bytes, format_count, format_seconds

_SMALLEST_SHARE = 0.005
"""Share of a sum below which parts have no row of their own."""
_PART_CELLS = 28


def plan_table(
    plan: Plan,
    graph: Graph | None = None,
    *,
    defaults: Sequence[ChosenDefault] = (),
    idle: str | None = None,
    job: Sequence[tuple[str, str]] = (),
) -> RenderableType:
    """A plan in words, one row for each of its parts.

    Args:
        graph: the model's graph; None leaves out its row.
        defaults: what was chosen where the request left batch, sequence or steps open.
        idle: why the plan leaves devices idle; None if it does not.
        job: what a run of it trains on and how long that takes, headings with words.
    """
    table = fact_table()
    if graph is not None:
        table.add_row("model", Text(describe_graph(graph)))
    for heading, words in job:
        table.add_row(heading, Text(words))
    table.add_row("machine", Text(plan.machine.partition("@")[0]))
    stack = describe_stack(plan)
    if stack is not None:
        table.add_row("stack", Text(stack))
    if idle is not None:
        table.add_row("devices", Text(idle, style="yellow"))
    table.add_row("parallelism", describe_parallelism(plan))
    if plan.parallel.pipeline > 1:
        virtual = (
            f", {plan.parallel.virtual_stages} virtual stages per rank"
            if plan.parallel.virtual_stages > 1
            else ""
        )
        table.add_row("schedule", f"{plan.parallel.schedule}{virtual}")
    if plan.parallel.replicas > 1:
        table.add_row("sharding", describe_sharding(plan))
    table.add_row("batch", describe_batch(plan, graph))
    if defaults:
        table.add_row("defaults", Text(describe_defaults(defaults)))
    table.add_row("precision", describe_precision(plan))
    table.add_row("recompute", describe_plan_recompute(plan))
    if sections := describe_sections(plan, graph):
        table.add_row("sections", sections)
    table.add_row("phases", describe_phases(plan))
    return table


def prediction_table(
    prediction: Prediction,
    *,
    plan: Plan | None = None,
    steps: int = 1,
    speedup: SparseSpeedup | None = None,
) -> RenderableType:
    """Predicted step time by term and instruction kind, and peak memory by class.

    Args:
        plan: the plan, to state what a run writes to each tier; None leaves that out.
        speedup: what sparse weights gain; None if all are dense.
    """
    table = fact_table()
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    step = format_seconds(prediction.step_seconds)
    table.add_row("predicted step", f"{step}, 80 % interval {low} to {high}")
    table.add_row("predicted speed", format_speed(prediction.tokens_per_second, prediction.unit))
    table.add_row("predicted MFU", format_mfu(prediction, prediction.step_seconds))
    if speedup is not None:
        table.add_row("predicted speed-up", describe_speedup(speedup))
    if prediction.compile_seconds:
        table.add_row("predicted compile", f"{format_seconds(prediction.compile_seconds)}, once")
    if prediction.offload is not None:
        table.add_row("predicted traffic", describe_traffic(prediction))
        if plan is not None:
            table.add_row("predicted writes", describe_writes(plan, prediction, steps))
    parts: list[RenderableType] = [table]
    parts.append(_shares("predicted step time by term", prediction.by_term, format_seconds))
    parts.append(_shares("predicted step time by instruction", prediction.by_kind, format_seconds))
    return Group(*_spaced(parts), memory_table(prediction))


def memory_table(prediction: Prediction) -> RenderableType:
    """Predicted peak memory by class, of the device and of each tier that holds something."""
    device, *offload = prediction.peaks
    peaks = (device, *(peak for peak in offload if peak.peak_bytes))
    return Group(*_spaced([_peak(peak) for peak in peaks]))


def runners_up_table(runners_up: Sequence[tuple[Plan, Prediction | None, str]]) -> RenderableType:
    """Plans that were not chosen, and the reasons.

    Args:
        runners_up: plan, its prediction if there is one, and the reason in words.
    """
    table = Table(
        box=box.SIMPLE_HEAD, title="runners-up, all numbers predicted, slower over the whole run",
        title_justify="left", title_style="bold", pad_edge=False,
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
    """`4 × 4 × 256, bfloat16, compiled, recompute`: a plan in one cell of a table."""
    size = f"{plan.batch.accumulation} × {plan.batch.micro} × {plan.batch.sequence}"
    parts = [size, plan.precision]
    if plan.parallel.devices > 1:
        parts.insert(0, parallel_degrees(plan))
    elif offloads_only_optimizer(plan):
        parts.append(describe_optimizer_offload(plan))
    parts += [plan.optimizer] if plan.optimizer else []
    parts += [] if plan.moments == "float32" else [f"{plan.moments} moments"]
    parts += [] if plan.ema is None else ["averaged weights"]
    parts += ["compiled"] if plan.compile else []
    parts += ["recompute"] if plan.recompute == "full" else []
    return ", ".join(parts)


def _spaced(parts: Sequence[RenderableType]) -> list[RenderableType]:
    """The parts, a blank line below each."""
    return [item for part in parts for item in (part, Text())]


def _peak(peak: TierPeak) -> RenderableType:
    over = f", {format_bytes(peak.over_bytes)} too much" if peak.over_bytes else ""
    name = (
        f"predicted peak in {peak.tier}: {format_bytes(peak.peak_bytes)} "
        f"of {format_bytes(peak.capacity_bytes)}{over}"
    )
    if peak.error:
        low, high = format_bytes(peak.low_bytes), format_bytes(peak.high_bytes)
        name += f", 80 % interval {low} to {high}"
    return _shares(name, {str(k): float(v) for k, v in peak.by_class.items()}, format_bytes)


def _shares(name: str, parts: Mapping[str, float], show: Callable[[float], str]) -> Group:
    """Parts of a sum with bars, largest first; parts below half a percent are added up."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=_PART_CELLS, no_wrap=True)
    table.add_column(justify="right", width=9, no_wrap=True)
    table.add_column(justify="right", width=5)
    table.add_column()  # of all, it alone gives way on a narrow terminal
    total = sum(parts.values()) or 1.0
    large = {part: size for part, size in parts.items() if size >= _SMALLEST_SHARE * total}
    small = {part: size for part, size in parts.items() if 0 < size < _SMALLEST_SHARE * total}
    for part, size in sorted(large.items(), key=lambda item: -item[1]):
        table.add_row(Text(part), show(size), f"{100 * size / total:.0f} %", bar(size / total))
    if small:
        rest = next(iter(small)) if len(small) == 1 else "other"
        share = sum(small.values()) / total
        words = "< 1 %" if share < _SMALLEST_SHARE else f"{100 * share:.0f} %"
        table.add_row(Text(rest), show(sum(small.values())), words, bar(share))
    return Group(Text(name, style="bold"), table)


def largest_model_table(run: LargestModelRun) -> RenderableType:
    """Predicted and measured sizes and times, the offload traffic, and the numerical check."""
    return Group(_head(run), _sizes(run), Text(_traffic(run)), _reference_check(run))


def _head(run: LargestModelRun) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    phases = f"{run.phases} phases" if run.phases > 1 else "all layers in memory at once"
    count = run.parameters
    device, offload = (size.measured / count for size in (run.device_bytes, run.offloaded_bytes))
    for name, words in (
        ("model", f"{run.model}: {format_count(count)} parameters"),
        ("step", f"{run.tokens} tokens, {run.precision}, {phases}"),
        ("moments", run.moments),
        ("a parameter", f"{device:.3g} bytes in device memory, {offload:.3g} bytes offloaded"),
        ("folder", run.folder),
    ):
        table.add_row(name, Text(words))
    return table


def _sizes(run: LargestModelRun) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, PredictedMeasured, object], ...] = (
        ("device memory peak", run.device_bytes, format_bytes),
        ("offloaded, on disk", run.offloaded_bytes, format_bytes),
        ("read", run.read_bytes, format_bytes),
        ("written", run.written_bytes, format_bytes),
        ("step with all updates", run.seconds, format_seconds),
        ("speed", run.tokens_per_second, format_speed),
        ("MFU", run.mfu, _percent),
    )
    for name, size, show in rows:
        ratio = size.measured / size.predicted if size.predicted else None
        columns = [show(value) for value in (size.predicted, size.measured)]  # type: ignore[operator]
        table.add_row(name, *columns, format_ratio(ratio))
    return table


def _traffic(run: LargestModelRun) -> str:
    return f"predicted for consecutive steps: {run.offload_summary}\n"


def _reference_check(run: LargestModelRun) -> Table:
    holds = run.verification.within_tolerance
    verdict = "equal to the reference but for rounding" if holds else "NOT EQUAL to the reference"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=verdict, title_justify="left",
                  title_style="bold" if holds else "bold red")  # fmt: skip
    for name in ("", "relative error", "tolerance", ""):
        table.add_column(name, justify="left" if not name else "right")
    for check in run.verification.comparisons:
        word = "equal" if check.within_tolerance else "differs"
        table.add_row(Text(check.name), f"{check.error:.2e}", f"{check.tolerance:.2e}", word)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
