"""Best-first search: bounds, what is open, and how little is priced."""

import random

import numpy as np
import pytest

from planner.test_multi_device import GRAPHS, WIDE, machine, request
from windlass.cost import ArrayClock
from windlass.planner.search.best_first import CLOCK_ERROR, BestFirst
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.least_recompute import most_sharing
from windlass.planner.search.memory_fit import MemoryFit
from windlass.planner.search.search_result import SearchResult
from windlass.planner.space.plan_space import PlanSpace

ROUNDING = 1e-9
"""Relative error of sums of the same terms in another order."""


def spaces(count: int) -> list[PlanSpace]:
    """Random spaces of small models on few devices, with links as slow as layers and faster."""
    chance, found = random.Random(7), []
    for _ in range(count):
        graph = chance.choice((*GRAPHS, *WIDE))
        host = chance.choice([None, 10**12])
        on = machine(chance.choice([3, 4, 6]), chance.choice([1e8, 1e10]), host)
        found.append(PlanSpace(request(batch=chance.choice([4, 6])), graph, on))
    return found


def test_no_bound_is_above_what_a_plan_takes_or_holds():
    looked_at = 0
    for space in spaces(3):
        clock = ArrayClock(space.base, space.graph, space.machine)
        bounds, everything = ConfigBounds(space, clock), np.arange(space.table.count)
        for pipeline in space.pipeline_degrees:
            for option in space.options(pipeline):
                configs = space.legal(option, everything)
                stages = np.full(len(configs), pipeline)
                least = bounds.stages(option, configs)
                even = bounds.passes(stages, configs)
                products = bounds.products(np.array([pipeline]))[0, configs]
                held = bounds.state_bytes(stages, configs)
                for columns, config in space.columns(option, configs):
                    place = np.searchsorted(configs, config)
                    seconds = clock.step_seconds(columns) * (1 + CLOCK_ERROR)
                    assert (least[place] <= seconds).all()
                    assert (even[place] <= seconds).all()
                    assert (products[place] <= seconds).all()
                    nbytes = clock.least_bytes(columns).max(axis=1)
                    assert (held[place] <= nbytes * (1 + ROUNDING)).all()
                    state = clock.state_bytes(columns).max(axis=1)
                    assert (state <= nbytes * (1 + ROUNDING)).all()
                    looked_at += columns.count
    assert looked_at > 500


def test_no_bound_with_recompute_is_above_what_a_plan_takes_that_fits():
    recomputing = 0
    for space, share in zip(spaces(6), (0.3, 0.5, 0.7, 0.4, 0.6, 0.8), strict=True):
        clock = ArrayClock(space.base, space.graph, space.machine)
        everything = np.arange(space.table.count)
        options = [each for count in space.pipeline_degrees for each in space.options(count)]
        batches = [
            (option, configs, *batch)
            for option in options
            for configs in (space.legal(option, everything),)
            for batch in space.columns(option, configs)
        ]
        held = np.concatenate([clock.least_bytes(each[2]).max(axis=1) for each in batches])
        budget = int(np.quantile(held, share))
        bounds = ConfigBounds(space, clock, budget)
        plain, fit = ConfigBounds(space, clock), MemoryFit(space, clock, budget)
        for option, configs, columns, config in batches:
            least = bounds.stages(option, configs)
            recomputing += int((least > plain.stages(option, configs) * (1 + ROUNDING)).sum())
            for plans, rows in fit.recomputed(columns, option, SearchResult()):
                place = np.searchsorted(configs, config[rows])
                seconds = clock.step_seconds(plans) * (1 + CLOCK_ERROR)
                assert (least[place] <= seconds).all()
    assert recomputing > 50


def test_of_all_sharding_that_of_the_most_sharing_needs_least_memory():
    for space in spaces(4):
        clock = ArrayClock(space.base, space.graph, space.machine)
        everything = np.arange(space.table.count)
        for pipeline in space.pipeline_degrees:
            for option in space.options(pipeline):
                for columns, config in space.columns(option, space.legal(option, everything)):
                    nbytes = clock.least_bytes(columns).max(axis=1)
                    most = most_sharing(columns, config)
                    for each in np.unique(config):
                        own = config == each
                        assert nbytes[own & most].min() <= nbytes[own].min() * (1 + ROUNDING)


def test_every_number_of_stages_is_open_and_devices_may_be_idle():
    space = PlanSpace(request(batch=6), GRAPHS[2], machine(5, 1e9))
    assert space.pipeline_degrees == (1, 2, 3, 4, 5)
    configs = np.arange(space.table.count)
    devices = {
        option.pipeline * int(space.table.devices[config])
        for pipeline in space.pipeline_degrees
        for option in space.options(pipeline)
        for config in space.legal(option, configs)
    }
    assert devices == {1, 2, 3, 4, 5}


def test_a_search_prices_few_plans_of_its_space():
    space = PlanSpace(request(batch=24), GRAPHS[2], machine(8, 1e9))
    result = BestFirst(space, 10**9).search()
    assert 0 < result.priced < space.count() / 4


@pytest.mark.parametrize("most", [1, 5])
def test_more_plans_are_found_fastest_first_and_all_fit(most: int):
    space = PlanSpace(request(batch=8), GRAPHS[1], machine(4, 1e9))
    budget = 2_000_000
    best = BestFirst(space, budget).search(most).best
    seconds = [prediction.step_seconds for _, prediction in best]
    assert len(best) >= most
    assert seconds == sorted(seconds)
    for plan, _ in best:
        assert max(stage_peak_bytes(plan, space.graph, space.machine)) <= budget


def test_where_nothing_fits_the_search_keeps_the_smallest_plans():
    space = PlanSpace(request(), GRAPHS[0], machine(4, 1e9))
    search = BestFirst(space, 1000)
    result = search.search()
    assert not result.best
    search.look_at_smallest(result)
    assert result.misfits
