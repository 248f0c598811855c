"""The lower bound on device memory against the programs' own count."""

import random

import pytest

from cost.clock.plan_draws import FROZEN_GRAPHS, GRAPHS, MACHINES, draw
from windlass.cost.clock.array_clock import ArrayClock
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.peak_memory import stage_tier_peaks
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph

ROUNDING = 1e-9
"""Relative error of sums in another order."""


def shares(seed: int, count: int, graphs: tuple[Graph, ...] = GRAPHS) -> list[float]:
    """The bound over the peak of each stage of so many random plans."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        graph, machine = chance.choice(graphs), chance.choice(MACHINES)
        plan = draw(chance, graph, machine)
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


@pytest.mark.slow
def test_so_it_is_for_a_thousand_plans():
    found = shares(seed=2, count=1000)
    print(f"mean {sum(found) / len(found):.4f}, least {min(found):.3f}")
