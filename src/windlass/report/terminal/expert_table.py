"""How evenly the experts of a run were busy, as a table of bars and a sentence."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import describe_dropped
from windlass.schema import Step

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 64
"""Most bars of a row; of more experts each bar is the busiest of a few."""


def expert_table(steps: Sequence[Step]) -> RenderableType | None:
    """The load of each expert in the last step that recorded it; None if none did.

    Args:
        steps: of a run, in order.
    """
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
