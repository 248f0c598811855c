"""Short: what a run whose memory ran out tells, with plans that fit into what there was."""

from pathlib import Path

from windlass.api.plan import Planned
from windlass.errors import OutOfMemory
from windlass.planner.advice.alternatives import alternatives
from windlass.planner.explain import explain_change
from windlass.torch_ext.cpu_allocator import set_memory_limit, trim_heap
from windlass.units import format_bytes

_NAMED = 3
_MIB = 2**20


def with_ways(short: OutOfMemory, planned: Planned, folder: Path) -> OutOfMemory:
    """The same with where to go on, and the fastest plans of each kind that would have fitted.

    Args:
        short: of the run; nothing holds its tensors any more.
        planned: the run.
        folder: of the run.
    """
    set_memory_limit(0)
    trim_heap()
    budget = short.room_bytes // _MIB
    prediction = planned.prediction
    peak = prediction.peaks[0].peak_bytes
    found = alternatives(
        planned.request,
        planned.graph,
        planned.machine,
        budget * _MIB,
        base=prediction.step_seconds / prediction.tokens_per_step,
        count=_NAMED,
    )
    had = f"this process had room for {format_bytes(short.room_bytes)} in all"
    lines = [
        f"{short}; {had}, and {format_bytes(peak)} were predicted",
        f"where there is more, `windlass resume {folder}` goes on",
    ]
    lines += ["a new run fits into what there was with"] if found else []
    lines += [f"- {explain_change(change, f'near={budget}MiB')}" for change in found]
    return OutOfMemory("\n".join(lines), available_bytes=short.room_bytes)
