"""Out of memory: turns the error into advice, plans that would have fitted."""

import shlex
from pathlib import Path

from windlass import planner
from windlass.errors import OutOfMemory
from windlass.jobs import Planned
from windlass.torch_ext import set_memory_limit, trim_heap
from windlass.units import format_bytes

_ALTERNATIVES = 3
"""Number of plans that the message proposes."""
_MIB = 2**20


def with_advice(error: OutOfMemory, planned: Planned, folder: Path) -> OutOfMemory:
    """The same error, with the fastest plans of each kind that fit into the memory there was."""
    set_memory_limit(0)
    trim_heap()
    budget = error.available_bytes // _MIB
    prediction = planned.prediction
    peak = prediction.peaks[0].peak_bytes
    changes = planner.alternatives(
        planned.request,
        planned.graph,
        planned.machine,
        budget * _MIB,
        base=prediction.step_seconds / prediction.tokens_per_step,
        count=_ALTERNATIVES,
    )
    available = f"{format_bytes(error.available_bytes)} were available to this process"
    resume = f"windlass resume {shlex.quote(str(folder))}"
    lines = [
        f"{error}; {available}, and {format_bytes(peak)} were predicted",
        f"`{resume}` continues this run where there is more memory",
    ]
    lines += ["a new run fits into that memory with"] if changes else []
    lines += [f"- {planner.explain_change(change, f'memory={budget}MiB')}" for change in changes]
    return OutOfMemory("\n".join(lines), available_bytes=error.available_bytes)
