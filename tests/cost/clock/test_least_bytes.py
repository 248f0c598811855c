"""The lower bound on device memory against the programs' own count."""

import random
from collections.abc import Iterator

import pytest

from cost.clock.plan_draws import FROZEN_GRAPHS, GRAPHS, MACHINES, draw
from windlass.cost.clock.array_clock import ArrayClock
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.peak_memory import stage_tier_peaks
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan

ROUNDING = 1e-9
"""Relative error of sums in another order."""


def draws(
    seed: int, count: int, graphs: tuple[Graph, ...], schedule: str | None
) -> Iterator[tuple[Plan, Graph, Machine]]:
    """So many random plans, of one schedule if it is named."""
    chance = random.Random(seed)
    while count:
        graph, machine = chance.choice(graphs), chance.choice(MACHINES)
        plan = draw(chance, graph, machine)
        if schedule in (None, plan.parallel.schedule):
            count -= 1
            yield plan, graph, machine


def shares(
    seed: int, count: int, graphs: tuple[Graph, ...] = GRAPHS, schedule: str | None = None
) -> list[float]:
    """The bound over the peak of each stage of so many random plans."""
    found = []
    for plan, graph, machine in draws(seed, count, graphs, schedule):
        clock, columns = ArrayClock(plan, graph, machine), PlanColumns.of([plan])
        least = clock.least_bytes(columns)[0]
        assert (clock.state_bytes(columns)[0] <= least * (1 + ROUNDING)).all(), plan
        peaks = stage_tier_peaks(plan, graph, machine, lower(plan, graph))
        for bound, (peak, *_) in zip(least.tolist(), peaks, strict=True):
            assert bound <= peak.peak_bytes * (1 + ROUNDING), plan
            found.append(bound / peak.peak_bytes)
    return found


def test_no_stage_holds_less_than_the_bound_and_few_hold_much_more():
    found = shares(seed=1, count=60)
    assert sum(found) / len(found) > 0.95


def test_neither_does_one_of_a_model_whose_first_layers_are_frozen():
    found = shares(seed=3, count=40, graphs=FROZEN_GRAPHS)
    assert sum(found) / len(found) > 0.9


def test_neither_does_one_whose_weights_wait_for_a_pass_of_their_own():
    found = shares(seed=5, count=100, schedule="zero-bubble")
    assert sum(found) / len(found) > 0.95


@pytest.mark.slow
def test_so_it_is_for_a_thousand_plans():
    found = shares(seed=2, count=1000)
    print(f"mean {sum(found) / len(found):.4f}, least {min(found):.3f}")
