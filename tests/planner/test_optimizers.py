"""What the planner makes of the memory that an optimizer takes or leaves."""

from factories import tiny_graph, tiny_machine
from windlass.planner.choose import choose_plan
from windlass.planner.defaults import resolve_defaults
from windlass.planner.result import PlanningResult
from windlass.schema.request import Request

GRAPH = tiny_graph(layers=8, width=4096, vocabulary=100)
MACHINE = tiny_machine(memory="8 GiB", host="64 GiB")


def planned(optimizer: str, *overrides: str) -> PlanningResult:
    sizes = ("train.batch=1", "train.sequence=2", "train.steps=5", "precision=float32")
    request = Request.resolve(overrides=(f"train.optimizer={optimizer}", *sizes, *overrides))
    return choose_plan(resolve_defaults(request, GRAPH, MACHINE)[0], GRAPH, MACHINE)


def test_a_model_whose_state_fits_with_lion_alone_is_offloaded_with_adamw_only():
    in_memory = ("phases=1", "offload.optimizer=device")
    peaks = {name: planned(name, *in_memory).prediction.peaks[0] for name in ("adamw", "lion")}
    assert peaks["adamw"].by_class["optimizer"] == 2 * peaks["lion"].by_class["optimizer"]

    budget = (peaks["adamw"].peak_bytes + peaks["lion"].peak_bytes) // 2
    adamw, lion = (planned(name, f"memory={budget}B") for name in ("adamw", "lion"))

    assert adamw.plan.offloads
    assert not lion.plan.offloads


def test_muon_is_never_planned_with_offloaded_state():
    peak = planned("muon", "phases=1").prediction.peaks[0].peak_bytes
    assert planned("muon", f"memory={peak // 2}B").plan is None
