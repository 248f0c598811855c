"""Planner: chooses the fastest plan that fits, and advises when nothing fits.

`choose` is the entry point. `space` enumerates the plans that a request leaves open, `search` finds
the fastest ones that fit in memory, `advice` says what would make a request fit, `explain` puts a
result into sentences, and `downscale` makes a small plan of the same structure for a rehearsal.
"""

from windlass.planner.advice.alternatives import (
    alternatives,
)
from windlass.planner.choose import (
    choose_plan,
)
from windlass.planner.defaults import (
    resolve_defaults,
    smaller_batches,
)
from windlass.planner.downscale import (
    downscale_plan,
)
from windlass.planner.explain import (
    Explanation,
    explain_change,
    explain_idle_devices,
    explain_result,
)
from windlass.planner.given_plan import (
    request_of_plan,
    result_of_given_plan,
)
from windlass.planner.result import (
    PlanningResult,
    with_budget,
)
from windlass.planner.space.pins import (
    pinned_parallelism,
)
from windlass.planner.space.tensor_degrees import (
    every_tensor_degree,
    open_tensor_degrees,
)

__all__ = [
    "Explanation",
    "PlanningResult",
    "alternatives",
    "choose_plan",
    "downscale_plan",
    "every_tensor_degree",
    "explain_change",
    "explain_idle_devices",
    "explain_result",
    "open_tensor_degrees",
    "pinned_parallelism",
    "request_of_plan",
    "resolve_defaults",
    "result_of_given_plan",
    "smaller_batches",
    "with_budget",
]
