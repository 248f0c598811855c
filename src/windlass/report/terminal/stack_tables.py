"""Tables of software stacks: one row for each, and all constants of one with their sources."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.terminal.tables import fact_table
from windlass.schema import Capabilities, Stack
from windlass.stacks import StackConstant

_WIDE = 76
"""Columns of a terminal from which what a stack is stands beside its name."""


def stacks_table(stacks: Sequence[Stack], width: int = 80) -> RenderableType:
    """What each stack is and can do, and how well its predictions are known.

    Args:
        width: columns of the terminal; on a narrow one, all but the name is in one column.
    """
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
