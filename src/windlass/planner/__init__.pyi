from .advice.alternatives import alternatives
from .advice.nearest_sayable import (
    NearestPlan, nearest_sayable, pinned_by, price_difference,
)  # fmt: skip
from .choose import NothingFits, choose_plan, seek_plan, without_pins
from .defaults import resolve_defaults, smaller_batches
from .downscale import downscale_plan
from .explain import Explanation, explain_change, explain_idle_devices, explain_result
from .given_plan import request_of_plan, result_of_given_plan
from .result import PlanningResult, RunnerUp, with_budget
from .search.fastest import Findings
from .search.evaluate import stage_peak_bytes
from .space.pins import pinned_parallelism
from .space.tensor_degrees import every_tensor_degree, open_tensor_degrees

__all__ = [
    "Explanation",
    "Findings",
    "NearestPlan",
    "NothingFits",
    "PlanningResult",
    "RunnerUp",
    "alternatives",
    "choose_plan",
    "downscale_plan",
    "every_tensor_degree",
    "explain_change",
    "explain_idle_devices",
    "explain_result",
    "nearest_sayable",
    "open_tensor_degrees",
    "pinned_by",
    "pinned_parallelism",
    "price_difference",
    "request_of_plan",
    "resolve_defaults",
    "result_of_given_plan",
    "seek_plan",
    "smaller_batches",
    "stage_peak_bytes",
    "with_budget",
    "without_pins",
]  # fmt: skip
