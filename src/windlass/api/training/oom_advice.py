"""Short: what a run whose memory ran out tells, with plans that fit into what there was."""

from pathlib import Path

from windlass.api.plan import Planned
from windlass.errors import MemoryShort
from windlass.planner.advice.alternatives import ways
from windlass.planner.explain import explain_change
from windlass.torch_ext.cpu_allocator import give_back, limit_blocks
from windlass.units import show_bytes

_NAMED = 3
_MIB = 2**20


def with_ways(short: MemoryShort, planned: Planned, folder: Path) -> MemoryShort:
    """The same with where to go on, and the fastest plans of each kind that would have fitted.

    Args:
        short: of the run; nothing holds its tensors any more.
        planned: the run.
        folder: of the run.
    """
    limit_blocks(0)
    give_back()
    budget = short.room_bytes // _MIB
    prediction = planned.prediction
    peak = prediction.peaks[0].peak_bytes
    found = ways(
        planned.request,
        planned.graph,
        planned.machine,
        budget * _MIB,
        base=prediction.step_seconds / prediction.tokens_per_step,
        count=_NAMED,
    )
    had = f"this process had room for {show_bytes(short.room_bytes)} in all"
    lines = [
        f"{short}; {had}, and {show_bytes(peak)} were predicted",
        f"where there is more, `windlass resume {folder}` goes on",
    ]
    lines += ["a new run fits into what there was with"] if found else []
    lines += [f"- {explain_change(change, f'near={budget}MiB')}" for change in found]
    return MemoryShort("\n".join(lines), room_bytes=short.room_bytes)
