"""Sensitivity: how much faster a plan would be if one constant of the machine were better."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from windlass.cost import ArrayClock, PlanColumns
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import Curve, Device, Machine, Plan, Point

BETTER = 1.1
"""Factor by which a rate is raised, or a latency divided."""


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
    space: PlanSpace, plan: Plan, by_term: Mapping[str, float]
) -> Mapping[str, float]:
    """Share of a step that 10 % better constants would save, by group of constants, most first.

    The plan stays as it is and is priced again by the array clock. No constant saves more than the
    simulated step spends on its terms.

    Args:
        space: space that the plan belongs to.
        plan: a plan with all layers on the device.
        by_term: seconds of the plan's simulated step by term.
    """
    columns = PlanColumns.of((plan,))

    def seconds(machine: Machine) -> float:
        return float(ArrayClock(space.base, space.graph, machine).step_seconds(columns)[0])

    base, step_seconds = seconds(space.machine), sum(by_term.values())
    saved = {}
    for name, better in _improved_machines(space.machine):
        spent = sum(by_term.get(term, 0.0) for term in _TERMS.get(name, _WAITING))
        limit = (1 - 1 / BETTER) * spent / step_seconds
        saved[name] = min(limit, 1 - seconds(better) / base)
    return dict(sorted(saved.items(), key=lambda item: -item[1]))


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


def _faster_matmul(device: Device) -> Device:
    rates = tuple(
        rate.model_copy(
            update={
                "curve": _scaled(rate.curve),
                "biased": rate.biased and _scaled(rate.biased),
                "tiles": rate.tiles
                and rate.tiles.model_copy(update={"efficiency": rate.tiles.efficiency * BETTER}),
            }
        )
        for rate in device.matmul
    )
    return device.model_copy(update={"matmul": rates})


def _faster_attention(device: Device) -> Device:
    rates = tuple(
        rate.model_copy(
            update={
                "attention": _scaled(rate.attention),
                "attention_rates": tuple(
                    each.model_copy(
                        update={
                            "forward": _scaled(each.forward),
                            "backward": _scaled(each.backward),
                        }
                    )
                    for each in rate.attention_rates
                ),
            }
        )
        for rate in device.matmul
    )
    return device.model_copy(update={"matmul": rates})


def _faster_memory(device: Device) -> Device:
    return device.model_copy(
        update={
            "traffic": _scaled(device.traffic),
            "fused_traffic": device.fused_traffic and _scaled(device.fused_traffic),
            "op_rates": tuple(
                each.model_copy(update={"curve": _scaled(each.curve)}) for each in device.op_rates
            ),
        }
    )


def _faster_update(device: Device) -> Device:
    mixed = device.mixed_update_rate
    return device.model_copy(
        update={
            "update_rate": device.update_rate * BETTER,
            "mixed_update_rate": mixed and mixed * BETTER,
        }
    )


def _faster_launch(device: Device) -> Device:
    return device.model_copy(update={"launch_seconds": device.launch_seconds / BETTER})


_DEVICE_CHANGES: Mapping[str, Callable[[Device], Device]] = MappingProxyType(
    {
        "matrix product rate": _faster_matmul,
        "attention rate": _faster_attention,
        "memory bandwidth": _faster_memory,
        "optimizer update rate": _faster_update,
        "operation launch time": _faster_launch,
    }
)


def _scaled(curve: Curve) -> Curve:
    return Curve(points=tuple(Point(point.size, point.rate * BETTER) for point in curve.points))
