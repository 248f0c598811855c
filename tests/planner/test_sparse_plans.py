"""Plans of models with sparse weights, on one device and on several."""

import pytest

from factories import catalog_graph, tiny_machine
from planner.single_stage import single_stage_plans
from windlass.cost.predict import predict_plan
from windlass.planner.choose import choose_plan
from windlass.planner.result import run_seconds
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.machine.rates import Curve, Point, SparseProductRate
from windlass.schema.request import ResolvedRequest
from windlass.schema.sparsity import SparsityRequest

STEPS = 10
DIALS = {"layers": 3, "width": 256, "heads": 4, "vocabulary": 90}
SPARSITY = SparsityRequest(level=0.75, block=32)


def request(*overrides: str) -> ResolvedRequest:
    sizes = ("train.batch=8", "train.sequence=64", f"train.steps={STEPS}")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def graphs() -> tuple[Graph, Graph]:
    """The model with all weights, and with a quarter of them."""
    return catalog_graph("gpt-tiny", **DIALS), catalog_graph("gpt-tiny", sparsity=SPARSITY, **DIALS)


def machine(**changes: object) -> Machine:
    found = tiny_machine(memory="4 GiB")
    rates = tuple(rate.model_copy(update=changes) for rate in found.device.matmul)
    return found.model_copy(update={"device": found.device.model_copy(update={"matmul": rates})})


FASTER_THAN_ANY_DENSE = tuple(
    SparseProductRate(block=32, role=role, call_seconds=1e-9, flop_rate=1e15)
    for role in ("forward", "input_gradient", "weight_gradient")
)


@pytest.mark.parametrize(
    "rates",
    [
        {"sparse_products": FASTER_THAN_ANY_DENSE},
        {"sparse_efficiency": Curve(points=(Point(32, 3.0),))},
        pytest.param(
            {"sparse_efficiency": Curve(points=(Point(32, 0.3),))}, marks=pytest.mark.slow
        ),
        {},
    ],
    ids=["measured", "efficient", "inefficient", "unknown"],
)
def test_the_choice_is_the_fastest_of_all_plans_however_fast_sparse_products_are(
    rates: dict[str, object],
):
    _, graph = graphs()
    asked, on = request("recompute_layers=1"), machine(**rates)
    predictions = [
        predict_plan(plan, graph, on)
        for plan in (
            *single_stage_plans(request(), graph, on),
            *single_stage_plans(asked, graph, on),
        )
    ]
    peaks = sorted(each.peaks[0].peak_bytes for each in predictions)
    for budget in (peaks[len(peaks) // 10], peaks[-1]):
        best = min(
            run_seconds(each, STEPS) for each in predictions if each.peaks[0].peak_bytes <= budget
        )
        choice = choose_plan(request().model_copy(update={"memory": budget}), graph, on)
        assert choice.run_seconds is not None
        assert choice.run_seconds <= best * (1 + 1e-9)
        assert choice.prediction is not None
        again = predict_plan(choice.plan, graph, on)
        assert choice.prediction.step_seconds == pytest.approx(again.step_seconds, rel=1e-9)


def test_memory_of_a_sparse_plan_falls_with_the_kept_share():
    dense, sparse = graphs()
    on = machine()
    asked = request("precision=float32", "compile=false", "recompute=none", "batch.micro=1")
    one, other = (choose_plan(asked, graph, on).prediction for graph in (dense, sparse))
    assert one is not None
    assert other is not None
    gone = dense.parameter_count - sparse.parameter_count

    for name, each in (("weights", 4), ("optimizer", 8), ("gradients", 4)):
        fall = one.peaks[0].by_class[name] - other.peaks[0].by_class[name]
        assert fall == pytest.approx(each * gone, rel=0.01)
