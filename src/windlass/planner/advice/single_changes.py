"""Single changes to a request of several devices with which a plan exists, or fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.planner.recompute_layers import recompute_layers, show_recompute_layers
from windlass.planner.result import EvaluatedPlan, InfeasiblePlan, request_values
from windlass.planner.search.evaluate import infeasible_plan
from windlass.planner.search.fastest import fastest_plans
from windlass.planner.search.search_result import SearchResult
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import Plan, ResolvedRequest

_SECTIONS = ("parallel", "sharding", "offload", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleChange:
    """One key that was changed or left open, and what a search without phases found then."""

    overrides: tuple[str, ...]
    """The new value, as overrides on the command line."""
    fitting: EvaluatedPlan | None
    """The fastest plan that fits; None if none does."""
    smallest: InfeasiblePlan | None
    """The smallest plan where none fits; None if there is no plan at all."""


def request_pins(request: ResolvedRequest) -> Iterator[tuple[str, object]]:
    """The keys of a plan that a request names, with their values."""
    yield "train.batch", request.train.batch
    for name in _SECTIONS:
        for key, value in getattr(request, name):
            if value is not None:
                yield f"{name}.{key}", value
    for name in ("precision", "compile", "recompute"):
        if (value := getattr(request, name)) is not None:
            yield name, value
    if request.recompute_layers is not None:
        yield "recompute_layers", show_recompute_layers(request.recompute_layers)
    if (request.phases or 1) > 1:  # other pins imply a single one
        yield "phases", request.phases


def open_pins(space: PlanSpace, budget_bytes: int) -> Iterator[SingleChange]:
    """What is found with each pin left open, all others kept; pins that change nothing left out."""
    for key, _ in request_pins(space.request):
        if key == "train.batch":
            continue
        opened = replace(space, request=with_value(space.request, key, None))
        found = fastest_plans(opened, budget_bytes, where="memory", keeps_smallest=True)
        result = found.in_memory
        change = _of_result(space, result, budget_bytes, key)
        if change is not None:
            yield change


def with_value(request: ResolvedRequest, key: str, value: object) -> ResolvedRequest:
    """The request with another value of one key; None leaves it open."""
    section, _, name = key.rpartition(".")
    if not section:
        return request.model_copy(update={name: value})
    part = getattr(request, section).model_copy(update={name: value})
    return request.model_copy(update={section: part})


def _of_result(
    space: PlanSpace, result: SearchResult, budget_bytes: int, key: str
) -> SingleChange | None:
    """What was found with a key left open; None if there is no plan, or none with another value."""
    if result.best:
        plan = result.best[0][0]
        return SingleChange(overrides=key_values(plan, key), fitting=result.best[0], smallest=None)
    if not result.misfits:
        return None
    _, columns, row = min(result.misfits.values(), key=lambda item: item[0])
    plan = space.plan(columns, row)
    smallest = infeasible_plan(plan, space.graph, space.machine, budget_bytes)
    return SingleChange(overrides=key_values(plan, key), fitting=None, smallest=smallest)


def key_values(plan: Plan, key: str) -> tuple[str, ...]:
    """A plan's value of a key, as overrides."""
    if key in ("recompute", "recompute_layers"):
        layers = recompute_layers(plan)
        some = () if layers is None else (f"recompute_layers={show_recompute_layers(layers)}",)
        return f"recompute={plan.recompute}", *some
    values = request_values(plan) | {"batch.accumulation": str(plan.batch.accumulation)}
    return (f"{key}={values.get(key, plan.offload.optimizer)}",)
