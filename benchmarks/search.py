"""Speed of the planner's search: exhaustive over a large space, and with branch and bound.

    python benchmarks/search.py [MODEL MACHINE BATCH]

Seconds are CPU time of this process on one core, with the graph captured beforehand. `kernel` is
the rate at which the closed form evaluates plans once the costs of their layers are cached.
"""

import sys
import time

from results import append_row
from windlass import api
from windlass.api.model_graph import capture_open_tensor_degrees
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.search.top_k import Candidate, TopK
from windlass.planner.space.plan_space import PlanSpace

DEFAULT = ("gpt3-175b", "dgx-a100-80gb:512", "4096")


def measure(model: str, machine: str, batch: str) -> dict[str, object]:
    """The figures of one plan space."""
    request = api.make_request(
        model, f"train.batch={batch}", "train.sequence=2048", machine=machine
    )
    target = api.find_machine(machine)
    graph = capture_open_tensor_degrees(request, api.capture(request.model), target)
    budget = target.device.memory.capacity_bytes
    space = PlanSpace(request, graph, target)
    first, first_seconds = timed(lambda: first_feasible(BranchAndBound(space, budget), budget))
    pruned, pruned_seconds = timed(lambda: BranchAndBound(space, budget).fastest(1))
    search = BranchAndBound(space, budget)
    full, full_seconds = timed(lambda: search.exhaustive(1))
    _, cached_seconds = timed(lambda: search.exhaustive(1))  # all layer costs are cached now
    assert full.best[0].step_seconds == pruned.best[0].step_seconds
    return {
        "model": model,
        "on": machine,
        "batch": batch,
        "plans": full.evaluated,
        "every_cpu_seconds": round(full_seconds, 2),
        "pruned_cpu_seconds": round(pruned_seconds, 2),
        "pruned_weighed": pruned.evaluated,
        "first_cpu_seconds": round(first_seconds, 3),
        "first_step_seconds": None if first is None else round(first.step_seconds, 2),
        "best_step_seconds": round(full.best[0].step_seconds, 2),
        "plans_a_second": round(full.evaluated / full_seconds),
        "kernel_plans_a_second": round(full.evaluated / cached_seconds),
    }


def first_feasible(search: BranchAndBound, budget_bytes: int) -> Candidate | None:
    """A plan that fits, found quickly: of the 1F1B shape with the fewest stages that has any."""
    top, space = TopK(1), search.space
    for shape, configs in space.open_shapes():
        if shape.schedule == "1f1b":
            table = space.config_table(shape)
            largest = configs[table.devices[configs] == table.devices[configs].max()]
            chosen = largest[table.options[largest] == table.options[largest].max()]
            batch = space.batch_of(shape, chosen)
            totals = search.totals(batch)
            top.add(batch, search.scores(batch, totals), totals, budget_bytes)
        if top.by_family:
            break
    return next(iter(top.result(of=top.evaluated).best), None)


def timed(work):  # noqa: ANN001, ANN201
    """The result of a call, and the CPU seconds of this process that it took."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


if __name__ == "__main__":
    row = measure(*(sys.argv[1:] or DEFAULT))
    print(*(f"{key:<22} {value}" for key, value in row.items()), sep="\n")
    append_row("search", **row)
