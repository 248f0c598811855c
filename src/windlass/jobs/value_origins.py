"""Where each value of a planned request comes from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from windlass.document import Document, format_value, leaf_fields
from windlass.jobs.planned import Planned
from windlass.schema import Plan, Request

_NOT_PLANNED = ("model", "sparsity", "lora", "machine", "stack", "memory", "data", "train")
"""Keys and tables that no planner decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrigin:
    """One key of a request with the value that is used."""

    key: str
    """Such as `train.batch`."""
    value: str
    """As it can be given."""
    origin: str
    """`default`, a default for model and machine with its reason, `FILE:LINE`, the override, or
    `planner`."""


def value_origins(planned: Planned, given: Mapping[str, str]) -> tuple[ValueOrigin, ...]:
    """Every key that has a value, and where it comes from.

    Args:
        planned: a request with its plan.
        given: where each key that was given comes from, as `Request.origins` returns it.

    Returns:
        The keys in the order of the request; those that the model decides are left out.
    """
    return tuple(_origins(planned, given))


def _origins(planned: Planned, given: Mapping[str, str]) -> Iterator[ValueOrigin]:
    reasons = {default.key: f"default: {default.reason}" for default in planned.defaults}
    plan = planned.result.plan
    for key, _ in leaf_fields(Request):
        value = _value(planned.request, key)
        origin = given.get(key) or reasons.get(key) or "default"
        if value is None and plan is not None and key.partition(".")[0] not in _NOT_PLANNED:
            value, origin = _planned_value(plan, key), "planner"
        if value is not None:
            yield ValueOrigin(key=key, value=format_value(value), origin=origin)


def _planned_value(plan: Plan, key: str) -> object:
    if key == "phases":
        return plan.phase_count
    return None if key == "recompute_layers" else _value(plan, key)


def _value(document: Document, key: str) -> object:
    value: object = document
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value
