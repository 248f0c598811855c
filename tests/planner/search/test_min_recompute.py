"""Plans with as little recompute as fits, in the tables that they are found in."""

from functools import partial

import numpy as np
import pytest

from planner.test_multi_device import GRAPHS, machine, request
from windlass.cost.batched.evaluate_batch import evaluate_batch
from windlass.planner.search.branch_and_bound import BranchAndBound
from windlass.planner.search.top_k import Candidate
from windlass.planner.space.plan_space import PlanSpace


def alone(sweep: BranchAndBound, found: Candidate) -> float:
    """Seconds of a step of a plan that is taken out of its table."""
    cell = found.batch
    rows = cell.table.one(found.row)
    return float(evaluate_batch(sweep.chain, cell.shape, cell.chunk_bounds, rows).step_seconds[0])


def test_a_plan_taken_out_of_its_table_takes_as_long_as_in_it():
    space = PlanSpace(request("compile=false", batch=16), GRAPHS[1], machine(8, 1e9))
    sizes = np.concatenate(
        [BranchAndBound(space, 0).totals(cell).peak_bytes for cell in space.batches()]
    )
    between = 0
    for budget in np.quantile(sizes, [0.1, 0.2, 0.3, 0.5]):
        sweep = BranchAndBound(space, float(budget))
        candidates = sweep.fastest(200).best
        assert [each.step_seconds for each in candidates] == pytest.approx(
            list(map(partial(alone, sweep), candidates))
        )
        recomputes = [
            each.batch.table.config_of(each.batch.table.config[each.row]).recompute
            for each in candidates
        ]
        between += sum(len(set(again)) > 1 for again in recomputes)
    assert between > 0
