"""CPU seconds of the planner's search for large models on large machines.

    python benchmarks/search.py [MODEL MACHINE BATCH]

Seconds are CPU time of this process on one core, with the graph made beforehand. `search` proves
the fastest plan; `answer` adds runners-up, plans that do not fit and what would help, as `plan`
does.
"""

import sys
import time

from results import append_row
from windlass import api
from windlass.jobs.model_graph import capture_open_tensor_degrees
from windlass.planner import choose_plan, resolve_defaults
from windlass.planner.search.best_first import BestFirst
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.plan_space import PlanSpace

DEFAULT = (
    ("gpt3-13b", "dgx-a100-80gb:8", "512"),
    ("gpt3-175b", "dgx-a100-80gb:512", "4096"),
    ("megatron-1t", "dgx-a100-80gb:384", "3072"),
    ("gpt3-175b", "ipu-pod256", "256"),
)


def measure(model: str, machine: str, batch: str) -> dict[str, object]:
    """The figures of one plan space."""
    asked = api.make_request(model, f"train.batch={batch}", "train.sequence=2048", machine=machine)
    target = api.find_machine(machine)
    resolved, _ = resolve_defaults(asked, api.capture(asked.model_identity), target)
    graph = capture_open_tensor_degrees(resolved, api.capture(asked.model_identity), target)
    budget = target.device.memory.capacity_bytes
    space = PlanSpace(resolved, graph, target)
    first = BestFirst(space, budget)
    # Nothing else is within -100 % of the first plan, so the search ends with it.
    _, first_seconds = timed(lambda: first.search(within=-1.0))
    found, seconds = timed(lambda: fastest_plans(PlanSpace(resolved, graph, target), budget))
    result, answer_seconds = timed(lambda: choose_plan(resolved, graph, target))
    prediction = result.prediction
    return {
        "model": model,
        "on": machine,
        "batch": batch,
        "plans": space.count(),
        "priced": found.evaluated,
        "first_cpu_seconds": round(first_seconds, 3),
        "search_cpu_seconds": round(seconds, 2),
        "answer_cpu_seconds": round(answer_seconds, 2),
        "best_step_seconds": prediction and round(prediction.step_seconds, 2),
    }


def timed(work):  # noqa: ANN001, ANN201
    """The result of a call, and the CPU seconds of this process that it took."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


if __name__ == "__main__":
    cases = (tuple(sys.argv[1:]),) if sys.argv[1:] else DEFAULT
    for case in cases:
        row = measure(*case)
        print(*(f"{key:<20} {value}" for key, value in row.items()), sep="\n", end="\n\n")
        append_row("search", **row)
