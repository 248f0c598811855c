"""How fast plans are searched: all of a large space, and without what is provably worse.

    python benchmarks/search.py [MODEL MACHINE BATCH]

Seconds are of this process's own time on one core, with the graph captured beforehand. `kernel` is
the rate at which the closed form prices plans once the prices of their layers are known.
"""

import sys
import time

from results import append_row
from windlass import api
from windlass.api.model_graph import capture_open_tensor_degrees
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.space.plan_space import PlanSpace

ASKED = ("gpt3-175b", "dgx-a100-80gb:512", "4096")


def measure(model: str, machine: str, batch: str) -> dict[str, object]:
    """The figures of one space."""
    request = api.make_request(
        model, f"train.batch={batch}", "train.sequence=2048", machine=machine
    )
    found = api.find_machine(machine)
    graph = capture_open_tensor_degrees(request, api.capture(request.model), found)
    near = found.device.memory.capacity_bytes
    field = PlanSpace(request, graph, found)
    first, first_seconds = timed(
        lambda: next(iter(BranchAndBound(field, near).first_feasible(1).best), None)
    )
    pruned, pruned_seconds = timed(lambda: BranchAndBound(field, near).fastest(1))
    sweep = BranchAndBound(field, near)
    every, every_seconds = timed(lambda: sweep.exhaustive(1))
    _, again_seconds = timed(lambda: sweep.exhaustive(1))  # all prices of layers are known now
    assert every.best[0].step_seconds == pruned.best[0].step_seconds
    return {
        "model": model,
        "on": machine,
        "batch": batch,
        "plans": every.evaluated,
        "every_cpu_seconds": round(every_seconds, 2),
        "pruned_cpu_seconds": round(pruned_seconds, 2),
        "pruned_weighed": pruned.evaluated,
        "first_cpu_seconds": round(first_seconds, 3),
        "first_step_seconds": None if first is None else round(first.step_seconds, 2),
        "best_step_seconds": round(every.best[0].step_seconds, 2),
        "plans_a_second": round(every.evaluated / every_seconds),
        "kernel_plans_a_second": round(every.evaluated / again_seconds),
    }


def timed(work):  # noqa: ANN001, ANN201
    """What it gives, and the seconds of this process that it took."""
    begun = time.process_time()
    given = work()
    return given, time.process_time() - begun


if __name__ == "__main__":
    row = measure(*(sys.argv[1:] or ASKED))
    print(*(f"{key:<22} {value}" for key, value in row.items()), sep="\n")
    append_row("search", **row)
