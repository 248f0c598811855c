"""Filters single-device plans by memory without simulating every one of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from windlass.planner.search.extrapolate import DevicePeak, peak_memory
from windlass.schema import Graph, Machine, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredPlans:
    """Plans that fit, and the nearest plan of each family in which some plan does not."""

    fitting: tuple[Plan, ...]
    infeasible: tuple[tuple[Plan, DevicePeak], ...]
    """Nearest to fitting first."""


def filter_by_memory(
    plans: Sequence[Plan], graph: Graph, machine: Machine, budget_bytes: int
) -> FilteredPlans:
    """Divides plans into those that fit the budget and those that do not.

    In one family (precision, compile, recompute, optimizer tier) peak memory grows with the
    micro-batch, so the largest that fits is found by bisection. A single micro-batch is a case of
    its own: without accumulation its gradients may be smaller.
    """
    fitting: list[Plan] = []
    refused: list[tuple[Plan, DevicePeak]] = []
    for _, members in groupby(sorted(plans, key=_sort_key), key=_family):
        several = list(members)
        whole = [plan for plan in several if plan.batch.accumulation == 1]
        parts = [plan for plan in several if plan.batch.accumulation > 1]
        too_large: list[tuple[Plan, DevicePeak]] = []
        for rising in (parts, whole):
            fits, memories = _largest_fitting(rising, graph, machine, budget_bytes)
            fitting += rising[:fits]
            if fits < len(rising):
                too_large.append((rising[fits], memories[fits]))
        if too_large:
            refused.append(min(too_large, key=_peak_bytes))
    return FilteredPlans(fitting=tuple(fitting), infeasible=tuple(sorted(refused, key=_peak_bytes)))


def _largest_fitting(
    rising: Sequence[Plan], graph: Graph, machine: Machine, budget_bytes: int
) -> tuple[int, Mapping[int, DevicePeak]]:
    """Number of plans that fit, by bisection, and the memory of those that were examined.

    The first plan that does not fit is always among them.
    """
    memories: dict[int, DevicePeak] = {}
    low, high = 0, len(rising)
    while low < high:
        middle = (low + high) // 2
        memories[middle] = peak_memory(rising[middle], graph, machine)
        if memories[middle].peak_bytes <= budget_bytes:
            low = middle + 1
        else:
            high = middle
    return low, memories


def _family(plan: Plan) -> tuple[str, bool, str, str]:
    return plan.precision, plan.compile, plan.recompute, plan.offload.optimizer


def _sort_key(plan: Plan) -> tuple[tuple[str, bool, str, str], int]:
    return _family(plan), plan.batch.micro


def _peak_bytes(item: tuple[Plan, DevicePeak]) -> int:
    return item[1].peak_bytes


def without_needless_recompute(plans: Sequence[Plan]) -> Iterator[Plan]:
    """The plans without those that recompute what they have room to keep.

    With all else equal, recompute adds instructions and removes none, so it is never faster.
    """
    keeping = {_without_recompute_key(plan) for plan in plans if plan.recompute == "none"}
    for plan in plans:
        if plan.recompute == "none" or _without_recompute_key(plan) not in keeping:
            yield plan


def _without_recompute_key(plan: Plan) -> tuple[str, bool, int, str]:
    return plan.precision, plan.compile, plan.batch.micro, plan.offload.optimizer
