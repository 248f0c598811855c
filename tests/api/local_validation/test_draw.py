"""What `validate here` draws."""

import pytest

from windlass.errors import RequestError
from windlass.schema import Request
from windlass.verify.local_validation.draw import OWN, SORTS, DrawnRun, draw_runs


def test_a_seed_draws_the_same_runs_and_fewer_are_the_first_of_more():
    assert draw_runs(12, 3) == draw_runs(40, 3)[:12]
    assert draw_runs(12, 3) != draw_runs(12, 4)


@pytest.mark.parametrize("stack", SORTS)
def test_every_sort_of_plan_is_drawn_and_each_is_a_request_of_at_least_one_sequence(stack: str):
    sorts = SORTS[stack]
    runs = draw_runs(len(sorts) * 4, 5, stack)
    assert {run.sort for run in runs} == set(sorts)
    for run in runs:
        request = Request.resolve(None, (f"model.name={run.model}", *run.overrides))
        batch, micro = request.train.batch, request.batch.micro
        assert batch is not None
        assert batch >= (micro or 1) >= 1
        assert (request.stack or OWN) == stack


def test_no_plan_at_all_is_refused():
    with pytest.raises(RequestError, match="at least 1"):
        draw_runs(0, 1)


def test_a_stack_whose_plans_nothing_here_runs_is_refused_by_name():
    with pytest.raises(RequestError, match="no plan of `torchtitan` runs here"):
        draw_runs(1, 1, "torchtitan")


def test_a_run_is_cut_to_less_work_and_stays_the_run_that_it_is():
    for run in draw_runs(40, 6):
        smaller = run.cut(0.3)
        assert smaller is not None
        assert tokens(smaller) * smaller.shape.parameters < tokens(run) * run.shape.parameters
        assert (smaller.number, smaller.sort, smaller.pins) == (run.number, run.sort, run.pins)
        same = {"layers": run.shape.layers, "sequence": run.shape.sequence}
        assert smaller.shape._replace(**same) == run.shape


def test_cutting_ends_with_one_short_sequence_that_still_has_the_pinned_phases():
    for run in draw_runs(20, 7):
        smallest, cuts = run, 0
        while (smaller := smallest.cut(0.5)) is not None:
            smallest, cuts = smaller, cuts + 1
        assert (smallest.micro, smallest.accumulation) == (1, 1)
        assert smallest.shape.sequence <= 16
        phases = next((int(pin[7:]) for pin in run.pins if pin.startswith("phases=")), 1)
        assert smallest.shape.layers + 2 >= phases
        assert cuts < 60


def tokens(run: DrawnRun) -> int:
    return run.micro * run.accumulation * run.shape.sequence
