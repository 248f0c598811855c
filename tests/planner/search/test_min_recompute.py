"""Plans that recompute as few layers as fit, in the tables that they are found in."""

from functools import partial

import numpy as np
import pytest
from planner.test_among import GRAPHS, machine, request

from windlass.cost.batched.evaluate import closed
from windlass.planner.search.branch_and_bound import Sweep
from windlass.planner.search.top_k import Found
from windlass.planner.space.plan_space import Field


def alone(sweep: Sweep, found: Found) -> float:
    """Seconds of a step of a plan that is taken out of its table."""
    cell = found.cell
    rows = cell.rows.one(found.place)
    return float(closed(sweep.chain, cell.shape, cell.ends, rows).step_seconds[0])


def test_a_plan_taken_out_of_its_table_takes_as_long_as_in_it():
    field = Field(request("compile=false", batch=16), GRAPHS[1], machine(8, 1e9))
    sizes = np.concatenate([Sweep(field, 0).totals(cell).peak_bytes for cell in field.cells()])
    between = 0
    for near in np.quantile(sizes, [0.1, 0.2, 0.3, 0.5]):
        sweep = Sweep(field, float(near))
        told = sweep.best(200).best
        assert [each.step_seconds for each in told] == pytest.approx(
            list(map(partial(alone, sweep), told))
        )
        agains = [each.cell.rows.run_of(each.cell.rows.run[each.place]).again for each in told]
        between += sum(len(set(again)) > 1 for again in agains)
    assert between > 0
