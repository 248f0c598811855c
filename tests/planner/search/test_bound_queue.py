"""Lower bounds that prune plans, against the times of the plans that they bound."""

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from planner.test_multi_device import GRAPHS, WIDE, machine, request
from windlass.cost.batched.evaluate_batch import evaluate_batch
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.planner.search.bound_queue import BoundQueue, LowerBounds, Subproblem
from windlass.planner.search.min_recompute import minimize_recompute
from windlass.planner.space.plan_space import PlanBatch, PlanSpace

ROUNDING = 1e-9
"""Relative error of sums of the same terms in another order."""


def fields(count: int) -> list[tuple[PlanSpace, LayerCosts]]:
    """Random fields of small models on few devices, with links as slow as layers and faster."""
    chance, found = random.Random(7), []
    for _ in range(count):
        graph = chance.choice((*GRAPHS, *WIDE))
        host = chance.choice([None, 10**12])
        kind = chance.choice(["cpu", "cuda"])
        on = machine(chance.choice([4, 6, 8]), chance.choice([1e8, 1e9, 1e10]), host, kind)
        space = PlanSpace(request(batch=chance.choice([4, 8, 24])), graph, on)
        found.append((space, LayerCosts(space.base, graph, on)))
    return found


def seconds_in(
    chain: LayerCosts, part: Subproblem, cell: PlanBatch, budget_bytes: float
) -> list[float]:
    """The least time of each plan of a subproblem over all its recompute, in seconds."""
    assert part.batch is not None
    totals = evaluate_batch(chain, cell.shape, cell.chunk_bounds, cell.table)
    fits = totals.peak_bytes <= budget_bytes
    keys = _keys(cell)
    best = {int(key): inf for key in _keys(part.batch)[part.items]}
    for key, seconds in zip(keys[fits].tolist(), totals.step_seconds[fits], strict=True):
        best[key] = min(best[key], float(seconds))
    whole = np.array([each.mode == "full" for each in cell.table.recomputes])[cell.table.recompute]
    full = replace(cell, table=cell.table.select(fits & whole[cell.table.config]))
    if full.table.count:
        none, selects = np.zeros(full.table.count), np.zeros(full.table.count, dtype=bool)
        fewer, tightened = minimize_recompute(chain, full, budget_bytes, none, selects)
        for key, seconds in zip(_keys(fewer).tolist(), tightened.step_seconds, strict=True):
            best[key] = min(best[key], float(seconds))
    return [best[int(key)] for key in _keys(part.batch)[part.items]]


def _keys(cell: PlanBatch) -> np.ndarray:
    rows = cell.table
    return (
        rows.layer_config[rows.config] * len(rows.sharding_table.options)
        + rows.places[rows.sharding]
    )


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_no_bound_is_above_what_a_plan_takes(share: float):
    looked_at = tight = 0
    for space, chain in fields(4):
        parts = list(LowerBounds(space, chain, inf).subproblems())
        cells = [space.batch_of(part.shape, part.items) for part in parts]
        sizes = [
            evaluate_batch(chain, each.shape, each.chunk_bounds, each.table).peak_bytes
            for each in cells
        ]
        budget = float(np.quantile(np.concatenate(sizes), share))
        bounds = LowerBounds(space, chain, budget)
        for part, cell in zip(bounds.subproblems(), cells, strict=True):
            totals = evaluate_batch(chain, cell.shape, cell.chunk_bounds, cell.table)
            tightened = bounds.tighten(part, inf)
            assert tightened.bound_level == "passes"
            least = dict(zip(tightened.items.tolist(), tightened.bounds, strict=True))
            of_plans = np.array(
                [least[at] for at in cell.table.layer_config[cell.table.config].tolist()]
            )
            assert (of_plans <= totals.step_seconds * (1 + ROUNDING)).all()
            tightened = bounds.tighten(tightened, inf)
            true = np.array(seconds_in(chain, tightened, cell, budget))
            assert (tightened.bounds <= true * (1 + ROUNDING)).all()
            looked_at += int(np.isfinite(true).sum())
            tight += int((tightened.bounds > 0.7 * true).sum())
    assert looked_at > 1000
    assert tight > looked_at / 10


def test_plans_that_cannot_fit_are_pruned_whatever_their_recompute():
    (space, chain), *_ = fields(1)
    for part in LowerBounds(space, chain, 1000.0).subproblems():
        bounds = LowerBounds(space, chain, 1000.0)
        assert not bounds.tighten(bounds.tighten(part, inf), inf).items.size


def test_a_queue_gives_the_part_with_the_least_bound_first():
    (space, chain), *_ = fields(1)
    queue = BoundQueue(LowerBounds(space, chain, inf).subproblems())
    taken = []
    while queue.least_bound < inf:
        taken.append(queue.least_bound)
        queue.pop()
    assert taken == sorted(taken)
    assert len(taken) > 3
