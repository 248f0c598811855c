"""Tables of a layer's traffic with far memory, by how far its ops are fused."""

from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.terminal.tables import NarrowingTable, titled_table
from windlass.schema import (
    ChipRates,
    DataflowReport,
    FlowEdge,
    FlowSection,
    FusedPass,
    PassFlow,
    SparsityLevel,
)
from windlass.units import (
    format_flop_rate,
    format_rate,
    format_seconds,
    format_traffic,
)

_LEVEL_COLUMNS = (
    "far memory", "kept", "FLOP/B", "sections", "needs", "time", "speed-up", "bound by",
)  # fmt: skip
_LEAST_NEEDED = ("sections", "kept", "FLOP/B", "bound by", "needs", "time")


def describe_dataflow(report: DataflowReport) -> tuple[str, str]:
    """What a report is about, and what the device offers, a line each."""
    chip = report.chip
    part = f"the {report.role} branch of `{report.kind}`" if report.role else f"`{report.kind}`"
    kept = sorted({round(100 * share, 1) for share in report.kept.values()})
    sparse = f", {' or '.join(f'{share:g}' for share in kept)} % of weights kept" if kept else ""
    subject = (
        f"{report.model}: {part} ({report.layers} layers), {report.micro} × {report.sequence} "
        f"tokens, {report.precision}{sparse}; all numbers predicted"
    )
    device = (
        f"one device of {chip.machine}: {format_traffic(chip.on_chip_bytes)} on the chip, "
        f"{chip.far_memory} memory at {format_rate(chip.far_rate)}, products at "
        f"{format_flop_rate(chip.product_rate)}, ridge {chip.ridge:,.0f} FLOP/byte"
    )
    return subject, device


def dataflow_table(report: DataflowReport) -> RenderableType:
    """Each pass, fused to each degree; columns without room are left out."""

    def make(columns: Sequence[str]) -> Table:
        table = _table(
            "traffic with far memory; training forward also writes what backward reads",
            "pass, fused",
        )
        for column in columns:
            justify: Literal["left", "right"] = "left" if column == "bound by" else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for flow in report.passes:
            table.add_row(Text(flow.name, style="bold"))
            for name, *cells in _level_rows(flow, report.chip):
                shown = dict(zip(_LEVEL_COLUMNS, cells, strict=True))
                table.add_row(name, *(shown[column] for column in columns))
        return table

    return NarrowingTable(make, _LEVEL_COLUMNS, _LEAST_NEEDED)


def _level_rows(flow: PassFlow, chip: ChipRates) -> Iterator[tuple[str, ...]]:
    slowest = flow.level("kernel by kernel").seconds
    for level in flow.levels:
        yield (
            f"  {level.fusion}",
            format_traffic(level.far_bytes),
            format_traffic(level.kept_bytes) if level.kept_bytes else "–",
            f"{level.intensity:,.0f}",
            str(len(level.sections)),
            format_traffic(level.on_chip_bytes),
            format_seconds(level.seconds),
            f"{slowest / level.seconds:.2f}",
            _bound(level, chip),
        )
    whole = flow.whole
    if whole.on_chip_bytes > chip.on_chip_bytes:
        yield (
            "  (one section)",
            format_traffic(whole.far_bytes),
            "",
            f"{whole.intensity:,.0f}",
            "1",
            format_traffic(whole.on_chip_bytes),
            format_seconds(whole.seconds),
            f"{slowest / whole.seconds:.2f}",
            "too large",
        )


def _bound(level: FusedPass, chip: ChipRates) -> str:
    """What takes longer over the whole pass."""
    return "arithmetic" if level.compute_seconds >= level.far_bytes / chip.far_rate else "memory"


def section_table(flow: PassFlow) -> RenderableType:
    """The sections of a pass as dataflow, with every edge: bytes, and whether it stays on chip."""
    table = _table(f"{flow.name} as dataflow, section by section", "tensor", "from", "to")
    table.add_column("on the chip", justify="right", no_wrap=True)
    table.add_column("far memory", justify="right", no_wrap=True)
    level = flow.level("dataflow")
    for number, section in enumerate(level.sections, 1):
        table.add_row(
            Text(f"section {number}", style="bold"),
            Text(f"needs {format_traffic(section.on_chip_bytes)}"),
            f"{section.flop / section.far_bytes:,.0f} FLOP/byte",
            "",
            Text(format_traffic(section.far_bytes), style="bold"),
        )
        for edge in _edges_of(level, section):
            size = format_traffic(edge.nbytes)
            table.add_row(
                Text(f"  {edge.tensor}"),
                Text("memory" if edge.source is None else flow.ops[edge.source].label),
                Text("memory" if edge.target is None else flow.ops[edge.target].label),
                *((size, "") if edge.on_chip else ("", size)),
            )
    return table


def _edges_of(level: FusedPass, section: FlowSection) -> list[FlowEdge]:
    ops = range(section.first, section.last)
    return [
        edge for edge in level.edges if (edge.source if edge.target is None else edge.target) in ops
    ]


def sparsity_table(report: DataflowReport) -> RenderableType:
    """The forward pass at each sparsity, fused to each degree."""
    table = _table("forward against sparsity", "sparsity", "fused")
    for column in ("far memory", "FLOP/B", "bandwidth needed", "memory needed", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    for level in report.curve:
        first = level.fusion == report.curve[0].fusion
        table.add_row(
            f"{100 * level.sparsity:g} %" if first else "",
            level.fusion,
            format_traffic(level.far_bytes),
            f"{level.intensity:,.0f}",
            format_rate(level.needed_bandwidth),
            format_traffic(level.on_chip_bytes),
            f"{level.speed_up:.2f}",
        )
    return table


def describe_thresholds(report: DataflowReport) -> str:
    """Above which sparsity the pass is memory-bound, by how far it is fused."""
    words = []
    for fusion, sparsity in report.memory_bound_above.items():
        name = "as one section" if fusion == "dataflow" else fusion
        where = "at no sparsity" if sparsity is None else f"above {100 * sparsity:.1f} %"
        words.append(f"{name} {'at every sparsity' if sparsity == 0 else where}")
    return f"below the ridge, and so bound by far memory: {', '.join(words)}"


def machines_dataflow_table(reports: Sequence[DataflowReport]) -> RenderableType:
    """Speed-up of dataflow over the dense pass kernel by kernel, by machine and sparsity."""
    table = _table(
        "speed-up of forward over dense kernel by kernel on the same device, as dataflow "
        "(kernel by kernel); all predicted",
        "machine",
    )
    table.add_column("on the chip", justify="right", no_wrap=True)
    table.add_column("ridge", justify="right", no_wrap=True)
    sparsities = list(dict.fromkeys(level.sparsity for level in reports[0].curve))
    for sparsity in sparsities:
        table.add_column(f"{100 * sparsity:g} %", justify="right", no_wrap=True)
    for report in reports:
        by_level = {(each.sparsity, each.fusion): each for each in report.curve}
        table.add_row(
            Text(report.chip.machine),
            format_traffic(report.chip.on_chip_bytes),
            f"{report.chip.ridge:,.0f}",
            *(
                _pair(by_level[sparsity, "dataflow"], by_level[sparsity, "kernel by kernel"])
                for sparsity in sparsities
            ),
        )
    return table


def _pair(fused: SparsityLevel, plain: SparsityLevel) -> str:
    return f"{fused.speed_up:.2f} ({plain.speed_up:.2f})"


def _table(title: str, *columns: str) -> Table:
    return titled_table(
        title, *columns, stays_whole=lambda column: column in ("machine", "pass, fused")
    )
