"""Tables of machines: a summary of one, one row for each, and every number with its source."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from windlass.hardware import StatedNumber
from windlass.report.terminal.tables import fact_table
from windlass.schema import Capabilities, Link, Machine, Stack
from windlass.stacks import StackConstant
from windlass.units import format_bytes, format_flop_rate, format_rate, format_seconds

_HOW_COLOURS = {
    "published": "green", "measured": "green", "fitted": "cyan", "derived": "cyan",
    "convention": "yellow", "guess": "red", "unverified": "red",
}  # fmt: skip


def machine_table(machine: Machine) -> RenderableType:
    """Summary of a machine: devices, rates, tiers, links and the source of the numbers."""
    table = fact_table()
    count = f"{machine.devices} × " if machine.devices > 1 else ""
    hosts = f" in {machine.hosts} hosts" if machine.hosts > 1 else ""
    table.add_row("machine", Text(f"{machine.name}: {count}{machine.device.kind}{hosts}"))
    for rate in machine.device.matmul:
        table.add_row(f"{rate.precision} peak", format_flop_rate(rate.peak))
    bandwidth = machine.device.traffic.points[-1].rate
    table.add_row("memory bandwidth", format_rate(bandwidth))
    table.add_row(
        "launch overhead", f"{format_seconds(machine.device.launch_seconds)} an operation"
    )
    for tier in machine.device.tiers:
        rates = [f"{format_rate(tier.read)} read"] if tier.read else []
        rates += [f"{format_rate(tier.write)} write"] if tier.write else []
        rates += [f"{format_rate(tier.both)} both at once"] if tier.both else []
        words = ", ".join((format_bytes(tier.capacity_bytes), *rates))
        table.add_row(Text(f"tier {tier.name}"), words)
    for link in machine.links:
        table.add_row(Text(f"link {link.name}"), _describe_link(link))
    if machine.devices > machine.devices_per_host:
        table.add_row("stragglers", _describe_stragglers(machine))
    if machine.execution_model != "overlapping":
        table.add_row("execution model", _describe_execution(machine))
    noise = f", noise {100 * machine.noise:.1f} %" if machine.noise is not None else ""
    if machine.is_contended:
        table.add_row(
            "disturbed",
            f"other processes used the cores {100 * machine.contention:.0f} % of the time; "
            "measure again when they have ended: `windlass probe`",
        )
    if machine.unmeasured:
        parts = ", ".join(machine.unmeasured)
        table.add_row("not measured", f"{parts}: when a plan needs it, or by `windlass probe`")
    table.add_row("source", Text(f"{machine.source}, {machine.date}{noise}"))
    return table


@dataclass(frozen=True, slots=True)
class MachinesTable:
    """One row for each machine, in groups: this one, clusters of GPUs, other clusters, devices."""

    machines: Sequence[tuple[str, Machine]]
    """The name to write in a request and the machine; for `NAME:N` the largest one."""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The table; a narrow terminal shows fewer of a machine's numbers."""
        yield _machines_table(self.machines, options.max_width)


def _machines_table(machines: Sequence[tuple[str, Machine]], width: int) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = [column for column, least in _COLUMNS if width >= least]
    for column in shown:
        justify: Literal["left", "right"] = (
            "left" if column in ("machine", "transfers") else "right"
        )
        table.add_column(column, justify=justify, no_wrap=True)
    groups: dict[str, list[tuple[str, Machine]]] = {name: [] for name in _GROUPS}
    for name, machine in machines:
        groups[_group(name, machine)].append((name, machine))
    for group, members in groups.items():
        if members:
            table.add_section()
            table.add_row(Text(group, style="bold"))
        for name, machine in members:
            row = _machine_row(name, machine)
            table.add_row(*(row[column] for column in shown))
    note = (
        "NAME:N is N hosts, or N devices of a PC. Memory and TFLOP/s are per device; links, "
        "innermost first, per port. Transfers overlap compute, or are serial with it "
        "(bulk-synchronous). `windlass machines new` writes a file for a machine of your own."
    )
    return Group(table, Text(note))


_COLUMNS = (
    ("machine", 0), ("devices", 0), ("memory\nGiB", 0), ("offload\nGiB", 76),
    ("TFLOP/s\n16 bit", 0), ("links\nGB/s", 62), ("transfers", 76),
)  # fmt: skip
"""Columns of the list, and the columns of a terminal that is wide enough for them."""

_GROUPS = ("measured here", "GPU hosts", "other hosts", "one GPU", "one other device")


def _group(name: str, machine: Machine) -> str:
    """The heading that a machine is listed under."""
    if machine.noise is not None:
        return "measured here"
    is_gpu = machine.device.kind in ("cuda", "amd")
    if machine.devices > 1 or name.endswith(":N"):
        return "GPU hosts" if is_gpu else "other hosts"
    return "one GPU" if is_gpu else "one other device"


def _machine_row(name: str, machine: Machine) -> dict[str, RenderableType]:
    device, *offload = machine.device.tiers
    fewest = 1 if machine.hosts == 1 else machine.devices_per_host
    largest = max((tier.capacity_bytes for tier in offload), default=0)
    cells: tuple[RenderableType, ...] = (
        Text(name),
        f"{fewest}–{machine.devices}" if name.endswith(":N") else str(machine.devices),
        _short(device.capacity_bytes / 2**30),
        _short(largest / 2**30) if largest else "–",
        _short(machine.device.rate(machine.device.half_precision).peak / 1e12),
        _rates(machine.links),
        "overlap" if machine.execution_model == "overlapping" else "serial",
    )
    return {column: cell for (column, _), cell in zip(_COLUMNS, cells, strict=True)}


def _short(value: float) -> str:
    """`0.88`, `74.5`, `2,250`: at least three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def numbers_table(machine: Machine, numbers: Sequence[StatedNumber]) -> RenderableType:
    """Every number of a machine with its kind of evidence and its source."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("number", overflow="fold", min_width=26)
    table.add_column("value", overflow="fold", min_width=11)
    table.add_column("how", no_wrap=True)
    table.add_column("source", overflow="fold", min_width=24)
    for number in numbers:
        how = number.source.how
        table.add_row(
            Text(number.path),
            number.text,
            Text(how, style=_HOW_COLOURS[how]),
            Text(number.source.source),
        )
    return Group(machine_table(machine), Text(), table)


def _rates(links: Sequence[Link]) -> str:
    """`160, 64, 25`: GB/s, innermost first."""
    return ", ".join(f"{link.rate / 1e9:.3g}" for link in links) or "–"


def _describe_link(link: Link) -> str:
    words = f"{format_rate(link.rate)}, {format_seconds(link.latency)}, joins {link.joins}"
    if link.shared_by is not None and link.shared_by > 1:
        words += f", {link.shared_by} devices share each"
    return words


def _describe_stragglers(machine: Machine) -> str:
    if machine.stragglers is None:
        return "unknown; predictions assume equally fast hosts"
    share = 100 * (machine.straggler_factor(machine.devices) - 1)
    return f"on all {machine.hosts} hosts a step takes {share:.1f} % longer for the slowest"


def _describe_execution(machine: Machine) -> str:
    share = machine.device.moving_share
    if not share:
        return machine.execution_model
    overlap = f"offload transfers overlap compute on {100 * share:.1f} % of the units"
    return f"{machine.execution_model}; {overlap}"


_WIDE = 76
"""Columns of a terminal from which what a stack is stands beside its name."""


@dataclass(frozen=True, slots=True)
class StacksTable:
    """What each stack is and can do, and how well its predictions are known."""

    stacks: Sequence[Stack]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The table; on a narrow terminal, all but the name is in one column."""
        yield _stacks_table(self.stacks, options.max_width)


def _stacks_table(stacks: Sequence[Stack], width: int) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stack", no_wrap=True)
    if width >= _WIDE:
        table.add_column("what it is", overflow="fold", ratio=1)
        table.add_column("what it can do", overflow="fold", ratio=1)
    else:
        table.add_column("what it is and can do", overflow="fold")
    for stack in stacks:
        about = (Text(stack.about), Text("; ".join(_abilities(stack.can))))
        cells = about if width >= _WIDE else (Text("\n").join(about),)
        table.add_row(Text(stack.name), *cells)
    note = (
        "`windlass stacks NAME` shows each constant with its source; `--stack NAME` or `--stack "
        "FILE.toml` predicts and plans for one. Only `windlass` is run by `windlass train`."
    )
    return Group(table, Text(note))


def stack_table(stack: Stack, constants: Iterable[StackConstant]) -> RenderableType:
    """One stack with every constant, its meaning and how it is known."""
    facts = fact_table()
    facts.add_row("stack", Text(stack.name))
    facts.add_row("about", Text(stack.about))
    facts.add_row("can do", Text("; ".join(_abilities(stack.can))))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("constant", overflow="fold", min_width=12)
    table.add_column("value", overflow="fold", min_width=8)
    table.add_column("meaning", overflow="fold", ratio=2)
    table.add_column("source", overflow="fold", ratio=1)
    for each in constants:
        if not each.key.startswith("can."):
            source = Text(f"{each.source.how}: {each.source.source}")
            table.add_row(Text(each.key), Text(each.text), Text(each.meaning), source)
    return Group(facts, Text(), table)


def _abilities(can: Capabilities) -> Iterator[str]:
    """What a stack can do, in the field's words."""
    degrees = {"tensor": can.tensor, "pipeline": can.pipeline, "context": can.context}
    parallel = [name for name, able in degrees.items() if able]
    yield (
        " and ".join(filter(None, (", ".join(parallel[:-1]), *parallel[-1:], "data"))) + " parallel"
    )
    if can.pipeline:
        yield f"schedules {', '.join(can.schedules)}"
    sharding = {"optimizer": "ZeRO-1", "parameters": "ZeRO-3"}
    names = [sharding[each] for each in can.sharding if each in sharding]
    names += ["FSDP with reshard"] if can.reshard else []
    names += ["HSDP"] if can.replica_groups else []
    if names:
        yield ", ".join(names)
    yield f"in {', '.join(can.precisions)}"
    if can.offload:
        yield "offload and phases"
