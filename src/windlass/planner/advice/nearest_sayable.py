"""The plan nearest to one that a stack cannot run, and what it costs beside it."""

from collections.abc import Sequence
from typing import NamedTuple

from windlass.planner.advice.single_changes import key_values, with_value
from windlass.planner.result import EvaluatedPlan
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.space.options import request_faults
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import StackNeed, unmet_needs
from windlass.schema import (
    BatchRequest,
    Graph,
    Machine,
    ParallelRequest,
    Plan,
    Prediction,
    ResolvedRequest,
    ShardingRequest,
    Stack,
)
from windlass.units import format_bytes, format_seconds

_LEARNED = frozenset({"train.optimizer", "train.ema", "sparsity"})
"""Keys that decide what is learned: no plan with another value is near."""
_PLAIN = {"moments": "float32", "master_weights": True}
"""What keys that are never open have where nothing is asked of them."""
_ROUNDS = 3


class NearestPlan(NamedTuple):
    """The plan that a stack can run which is nearest to one that it cannot."""

    plan: Plan
    prediction: Prediction
    words: str
    """What it has in place of what was asked for, and its price beside that."""


def with_nearest(
    faults: Sequence[str], request: ResolvedRequest, graph: Graph, machine: Machine
) -> Sequence[str]:
    """Faults of a request, the last of which names the nearest plan if all are the stack's.

    Args:
        faults: what is wrong with the request.
        graph: the model, with the shards that the request leaves open.
    """
    stack = machine.stack
    if stack is None or any(f"but `{stack.name}` has no " not in each for each in faults):
        return faults
    nearest = nearest_sayable(request, graph, machine, stack)
    if nearest is None:
        return faults
    return (
        *faults[:-1],
        f"{faults[-1]}; the nearest plan that `{stack.name}` can run has {nearest.words}",
    )


def nearest_sayable(
    request: ResolvedRequest, graph: Graph, machine: Machine, stack: Stack
) -> NearestPlan | None:
    """Which plan of the machine's stack is nearest to a request that it cannot run.

    Both plans are priced with the stack's own constants, the asked one as if the stack could.

    None if the stack can run nothing near it.
    """
    able, changed, keys = stack, request, dict[str, None]()
    for _ in range(_ROUNDS):
        for need in unmet_needs(changed, stack):
            if need.key in _LEARNED:
                return None
            able = able.model_copy(update={"can": need.granted(able.can)})
            said = _changes(need, changed)
            keys |= dict.fromkeys(said)
            for key, value in said.items():
                changed = with_value(changed, key, value)
    nearest = _fastest(changed, graph, machine) if keys else None
    if nearest is None:
        return None
    asked = _fastest(request, graph, machine.model_copy(update={"stack": able}))
    values = [
        (f"{key}={str(_PLAIN[key]).lower()}",) if key in _PLAIN else key_values(nearest[0], key)
        for key in keys
    ]
    words = " ".join(dict.fromkeys(each for value in values for each in value))
    is_gathered_once = nearest[0].sharding.parameters > 1 and not nearest[0].sharding.reshard
    note = " (FSDP never resharded)" if "sharding.reshard" in keys and is_gathered_once else ""
    price = price_difference(nearest[1], None if asked is None else asked[1])
    return NearestPlan(*nearest[:2], f"`{words}`{note}: {price}")


def pinned_by(plan: Plan, request: ResolvedRequest) -> ResolvedRequest:
    """The request with every choice of a plan that decides how it is divided."""
    parallel, batch, sharding = plan.parallel, plan.batch, plan.sharding
    return request.model_copy(
        update={
            "parallel": ParallelRequest(**dict(parallel)),
            "sharding": ShardingRequest(**dict(sharding)),
            "batch": BatchRequest(micro=batch.micro, accumulation=batch.accumulation),
            "precision": plan.precision,
            "compile": plan.compile or None,
            "recompute": plan.recompute,
        }
    )


def _changes(need: StackNeed, request: ResolvedRequest) -> dict[str, object]:
    """What keys have in the nearest request without a need; None leaves one open."""
    asked = request.parallel
    if need.ability == "sharding" and need.member == "optimizer":
        degree = need.value
        return {
            "sharding.parameters": degree, "sharding.optimizer": degree, "sharding.reshard": False
        }  # fmt: skip
    if need.ability == "replica_groups":
        replicas = (asked.data or 1) * (asked.context or 1)
        keys = ("parameters", "optimizer") if request.sharding.parameters else ("optimizer",)
        return {f"sharding.{key}": replicas for key in keys}
    return {need.key: _PLAIN.get(need.key)}


def _fastest(request: ResolvedRequest, graph: Graph, machine: Machine) -> EvaluatedPlan | None:
    """The fastest plan that fits; None if none does, or the request asks for the impossible."""
    if any(request_faults(request, graph, machine)):
        return None
    space = PlanSpace(request, graph, machine)
    best = fastest_plans(space, request.memory or machine.budget_bytes).best
    return best[0] if best else None


def price_difference(prediction: Prediction, asked: Prediction | None) -> str:
    """How much more time and memory a plan takes than what was asked for."""
    seconds, size = prediction.step_seconds, prediction.peaks[0].peak_bytes
    if asked is None:
        return f"{format_seconds(seconds)} a step, {format_bytes(size)} a device"
    seconds -= asked.step_seconds
    size -= asked.peaks[0].peak_bytes
    return (
        f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))} a step, "
        f"{'-' if size < 0 else '+'}{format_bytes(abs(size))} a device"
    )
