"""How much faster a plan with sparse weights is predicted to be than the same with dense ones."""

from windlass.api.model_graph import capture
from windlass.api.plan import Planned
from windlass.api.plan_file import with_tensor_shards
from windlass.cost import predict_plan
from windlass.schema import SparseSpeedup


def sparse_speedup(planned: Planned) -> SparseSpeedup | None:
    """The predicted speed-up of a plan, and its limit; None without a plan or sparse weights.

    Dense weights are planned alike: the same parallelism, batch, precision and phases, whether or
    not they fit.

    Args:
        planned: a plan with its prediction.

    Raises:
        ModelError: the dense model cannot be captured.
    """
    result, request, machine = planned.result, planned.request, planned.machine
    if request.sparsity is None or result.plan is None or result.prediction is None:
        return None
    plan, objects = result.plan, planned.objects
    model = request.model_copy(update={"sparsity": None}).model_identity
    graph = capture(model, objects, machine.stack)
    graph = with_tensor_shards(model, graph, plan, objects, machine.stack)
    dense = predict_plan(plan.model_copy(update={"graph": graph.label}), graph, machine)
    ideal_machine = machine.model_copy(update={"device": machine.device.with_ideal_sparsity()})
    ideal = predict_plan(plan, planned.graph, ideal_machine)
    return SparseSpeedup(
        dense_seconds=dense.step_seconds,
        speedup=dense.step_seconds / result.prediction.step_seconds,
        limit=dense.step_seconds / ideal.step_seconds,
    )
