"""A recorded step as one table for a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import format_ratio, format_speed
from windlass.schema.largest_model import LargestModelRun, PredictedMeasured
from windlass.units import format_bytes, format_count, format_seconds


def largest_model_table(recorded: LargestModelRun) -> RenderableType:
    """What a step took, predicted beside measured, the law of its moves, and how it was proved."""
    return Group(_head(recorded), _sizes(recorded), Text(_law(recorded)), _proof(recorded))


def _head(recorded: LargestModelRun) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    phases = f"{recorded.phases} phases" if recorded.phases > 1 else "all layers in memory at once"
    count = recorded.parameters
    near, far = (
        size.measured / count for size in (recorded.device_bytes, recorded.offloaded_bytes)
    )
    for name, words in (
        ("model", f"{recorded.model}: {format_count(count)} parameters"),
        ("step", f"{recorded.tokens} tokens, {recorded.precision}, {phases}"),
        ("moments", recorded.moments),
        ("a parameter", f"{near:.3g} bytes near, {far:.3g} bytes far"),
        ("folder", recorded.folder),
    ):
        table.add_row(name, Text(words))
    return table


def _sizes(recorded: LargestModelRun) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, PredictedMeasured, object], ...] = (
        ("near peak", recorded.device_bytes, format_bytes),
        ("far, on disk", recorded.offloaded_bytes, format_bytes),
        ("read", recorded.read_bytes, format_bytes),
        ("written", recorded.written_bytes, format_bytes),
        ("the step, all updated", recorded.seconds, format_seconds),
        ("speed", recorded.tokens_per_second, format_speed),
        ("MFU", recorded.mfu, _percent),
    )
    for name, size, show in rows:
        ratio = size.measured / size.predicted if size.predicted else None
        told = [show(value) for value in (size.predicted, size.measured)]  # type: ignore[operator]
        table.add_row(name, *told, format_ratio(ratio))
    return table


def _law(recorded: LargestModelRun) -> str:
    return f"predicted for steps that follow each other: {recorded.offload_summary}\n"


def _proof(recorded: LargestModelRun) -> Table:
    holds = recorded.verification.within_tolerance
    verdict = "equal to the reference but for rounding" if holds else "NOT EQUAL to the reference"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=verdict, title_justify="left",
                  title_style="bold" if holds else "bold red")  # fmt: skip
    for name in ("", "relative error", "tolerance", ""):
        table.add_column(name, justify="left" if not name else "right")
    for each in recorded.verification.comparisons:
        word = "equal" if each.within_tolerance else "differs"
        table.add_row(Text(each.name), f"{each.error:.2e}", f"{each.tolerance:.2e}", word)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
