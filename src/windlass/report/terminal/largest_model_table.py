"""The table of `windlass largest-model`: a measured step compared with its prediction."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import format_ratio, format_speed
from windlass.schema import LargestModelRun, PredictedMeasured
from windlass.units import format_bytes, format_count, format_seconds


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
