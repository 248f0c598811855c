"""Sensitivity: how much faster a plan would be if one constant of the machine were better."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

from windlass.cost import ArrayClock
from windlass.document import Document
from windlass.planner.result import Change, EvaluatedPlan
from windlass.planner.search.evaluate import evaluate
from windlass.planner.search.least_recompute import fits_tiers
from windlass.planner.search.phase_bounds import PhasePrices
from windlass.planner.search.truncated_plan import TruncatedPlan
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import (
    AttentionRate,
    Curve,
    Device,
    Machine,
    OpRate,
    Plan,
    Point,
    TileRate,
)

_Document = TypeVar("_Document", bound=Document)

BETTER = 1.1
"""Factor by which a rate is raised, or a latency divided."""

_LEAST_GAIN = 0.01
"""Share of a token's time that a change saves at least to be named."""
_WAITING = ("communication and waiting", "waiting for offload")

_TERMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matrix product rate": ("matmul", *_WAITING),
        "attention rate": ("attention", *_WAITING),
        "memory bandwidth": ("traffic", "norm", "load", *_WAITING),
        "optimizer update rate": ("update",),
        "operation launch time": ("launch", *_WAITING),
        "waiting for the slowest host": ("waiting for the slowest host",),
    }
)
"""Terms of a step that a better constant can shorten; other stages wait for slow passes. Links
shorten waiting only."""


def sensitivities(
    clock: ArrayClock, plan: Plan, by_term: Mapping[str, float]
) -> Mapping[str, float]:
    """Share of a step that 10 % better constants would save, by group of constants, most first.

    The plan stays as it is and is priced again by the array clock. No constant saves more than the
    simulated step spends on its terms.

    Args:
        plan: a plan with all layers on the device.
        by_term: seconds of the plan's simulated step by term.
    """
    names, machines = zip(*_improved_machines(clock.machine), strict=True)
    base, *better = clock.seconds_by_machine(plan, (clock.machine, *machines)).tolist()
    saved, step_seconds = {}, sum(by_term.values())
    for name, seconds in zip(names, better, strict=True):
        spent = sum(by_term.get(term, 0.0) for term in _TERMS.get(name, _WAITING))
        limit = (1 - 1 / BETTER) * spent / step_seconds
        saved[name] = min(limit, 1 - seconds / base)
    return dict(sorted(saved.items(), key=lambda item: -item[1]))


def larger_batch(space: PlanSpace, best: EvaluatedPlan, clock: ArrayClock) -> Change | None:
    """The plan with twice the micro-batches; None if that saves less than 1 % of a token's time.

    Without phases more micro-batches need no more memory. They share the pipeline's bubble, the
    update and what replicas send each other.
    """
    plan, prediction = best
    batch = plan.batch.model_copy(update={"accumulation": 2 * plan.batch.accumulation})
    twice = plan.model_copy(update={"batch": batch})
    capacity_bytes = prediction.peaks[0].capacity_bytes
    if plan.is_offloaded("parameters"):
        short = TruncatedPlan(twice, PhasePrices(clock))
        least_cost = short.step_seconds / (2 * prediction.step_seconds) - 1
        if least_cost > -_LEAST_GAIN or short.peak_bytes > capacity_bytes:
            return None
        fits = fits_tiers(twice, space)
        seconds, peak_bytes = short.whole_step_seconds, short.peak_bytes
    else:
        double = evaluate(twice, clock, budget_bytes=capacity_bytes)
        fits, seconds = double.fits, double.step_seconds
        peak_bytes = double.peaks[0].peak_bytes
    cost = seconds / (2 * prediction.step_seconds) - 1
    if cost > -_LEAST_GAIN or not fits:
        return None
    return Change(
        overrides=(f"train.batch={twice.global_batch}",), plan=twice, peak_bytes=peak_bytes,
        cost=cost,
    )  # fmt: skip


def _improved_machines(machine: Machine) -> Iterator[tuple[str, Machine]]:
    for name, change in _DEVICE_CHANGES.items():
        yield name, machine.model_copy(update={"device": change(machine.device)})
    if machine.stragglers:
        fewer = machine.model_copy(update={"stragglers": machine.stragglers / BETTER})
        yield "waiting for the slowest host", fewer
    for at, link in enumerate(machine.links):
        for name, faster in (
            ("bandwidth", {"rate": link.rate * BETTER}),
            ("latency", {"latency": link.latency / BETTER}),
        ):
            links = list(machine.links)
            links[at] = link.model_copy(update=faster)
            yield f"{name} of link {link.name}", machine.model_copy(update={"links": tuple(links)})


def _better(value: _Document, *names: str) -> _Document:
    """The document with some fields better."""
    return value.model_copy(update={name: _raised(getattr(value, name)) for name in names})


def _raised(value: object) -> object:
    """A rate that is higher, or all rates of a value; None stays."""
    match value:
        case float() | int():
            return value * BETTER
        case Curve():
            return Curve(points=tuple(Point(size, rate * BETTER) for size, rate in value.points))
        case tuple():
            return tuple(map(_raised, value))
        case TileRate():
            return _better(value, "efficiency")
        case AttentionRate():
            return _better(value, "forward", "backward")
        case OpRate():
            return _better(value, "curve")
    return value


def _better_rates(device: Device, *names: str) -> Device:
    rates = tuple(_better(rate, *names) for rate in device.matmul)
    return device.model_copy(update={"matmul": rates})


_DEVICE_CHANGES: Mapping[str, Callable[[Device], Device]] = MappingProxyType(
    {
        "matrix product rate": lambda device: _better_rates(device, "curve", "biased", "tiles"),
        "attention rate": lambda device: _better_rates(device, "attention", "attention_rates"),
        "memory bandwidth": lambda device: _better(device, "traffic", "fused_traffic", "op_rates"),
        "optimizer update rate": lambda device: _better(device, "update_rate", "mixed_update_rate"),
        "operation launch time": lambda device: device.model_copy(
            update={"launch_seconds": device.launch_seconds / BETTER}
        ),
    }
)
