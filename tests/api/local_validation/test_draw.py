"""What `validate here` draws."""

import pytest

from windlass.api.local_validation.draw import SORTS, draw_runs
from windlass.errors import RequestError
from windlass.schema import Request


def test_a_seed_draws_the_same_runs_and_fewer_are_the_first_of_more():
    assert draw_runs(12, 3) == draw_runs(40, 3)[:12]
    assert draw_runs(12, 3) != draw_runs(12, 4)


def test_every_sort_of_plan_is_drawn_and_each_is_a_request_of_at_least_one_sequence():
    runs = draw_runs(len(SORTS) * 4, 5)
    assert {run.sort for run in runs} == set(SORTS)
    for run in runs:
        request = Request.resolve(None, (f"model.name={run.model}", *run.overrides))
        batch, micro = request.train.batch, request.batch.micro
        assert batch is not None
        assert batch >= (micro or 1) >= 1


def test_no_plan_at_all_is_refused():
    with pytest.raises(RequestError, match="at least 1"):
        draw_runs(0, 1)
