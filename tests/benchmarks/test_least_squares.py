"""Fitting constants, and choosing the rows that they are fitted from."""

from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import pytest

from fitting.least_squares import fit_constants
from fitting.stacks import calibration_runs, fit_stack, interval_half_width
from validation.made_tables import run_of
from windlass.validation.formulas import Column
from windlass.validation.predict_run import predict_runs
from windlass.validation.published_run import PublishedRun
from windlass.validation.software_stacks import FOLDER, stack_catalog
from windlass.validation.stack_constants import (
    P90_Z,
    ConstantPrior,
    calibration,
    prior_calibration,
    prior_constants,
    priors,
)

FOUND = 0.01
"""A prior of spread 1 beside forty exact rows pulls a constant by less than a percent."""
LOOSE = ConstantPrior(value=1.0, spread=1.0, about="")
SIZES = np.geomspace(1.0, 100.0, 40)


def _line(given: dict[str, float]) -> Column:
    return given["each"] * SIZES + given["fixed"]


def test_constants_that_made_the_rows_are_found_again():
    measured = _line({"each": 0.3, "fixed": 2.0})

    found = fit_constants(
        lambda given: _line(dict(given)), measured, {"each": LOOSE, "fixed": LOOSE}
    )

    assert found == pytest.approx({"each": 0.3, "fixed": 2.0}, rel=FOUND)


def test_a_few_disturbed_runs_hardly_move_a_constant():
    measured = _line({"each": 0.3, "fixed": 2.0})
    measured[::10] *= 3.0

    found = fit_constants(
        lambda given: _line(dict(given)), measured, {"each": LOOSE, "fixed": LOOSE}
    )

    assert _line(found) == pytest.approx(_line({"each": 0.3, "fixed": 2.0}), rel=0.1)


def test_a_constant_that_no_row_speaks_of_stays_at_its_prior():
    prior = {"each": LOOSE, "fixed": LOOSE, "idle": ConstantPrior(value=7.0, spread=1.0, about="")}

    found = fit_constants(
        lambda given: _line(dict(given)), _line({"each": 0.3, "fixed": 2.0}), prior
    )

    assert found["idle"] == pytest.approx(7.0, rel=1e-9)


def test_a_tight_prior_gives_way_less_than_a_loose_one():
    measured = _line({"each": 2.0, "fixed": 1.0})[:2]
    tight = ConstantPrior(value=1.0, spread=0.05, about="")

    def law(given: dict[str, float]) -> Column:
        return _line(given)[:2]

    held = fit_constants(lambda given: law(dict(given)), measured, {"each": tight, "fixed": tight})
    free = fit_constants(lambda given: law(dict(given)), measured, {"each": LOOSE, "fixed": LOOSE})

    assert 1.0 < held["each"] < free["each"]


def _runs(folder: Path, count: int) -> list[PublishedRun]:
    """Runs of one stack whose times are what its kept constants predict."""
    runs = [
        run_of(folder, t=t, d=64 // t, microbatch=b, layers=layers)
        for t in (1, 2, 4, 8) for b in (1, 2, 4, 8) for layers in (12, 30)
    ][:count]  # fmt: skip
    return [replace(one.run, step_seconds=one.step_seconds) for one in predict_runs(runs)]


def test_calibration_rows_do_not_depend_on_what_was_measured(tmp_path: Path):
    runs = _runs(tmp_path, 32)
    shuffled = [replace(run, step_seconds=1.0) for run in reversed(runs)]

    chosen = {run.key for run in calibration_runs(runs, 8, seed=1)}

    assert len(chosen) == 8
    assert chosen == {run.key for run in calibration_runs(shuffled, 8, seed=1)}
    assert chosen != {run.key for run in calibration_runs(runs, 8, seed=2)}


def test_a_stack_is_fitted_to_its_rows_from_priors_that_are_off(tmp_path: Path):
    runs = _runs(tmp_path, 32)
    start = prior_constants("vtrain")

    fitted = fit_stack(
        "vtrain", runs, start, not_fitted=frozenset(), spread_factors={}, default_spread_factor=1.0
    )

    def miss(values: dict[str, float]) -> float:
        found = predict_runs(runs, lambda _: prior_calibration("vtrain", values))
        return float(np.mean([abs(one.step_seconds / (one.run.step_seconds or 1) - 1)
                              for one in found]))  # fmt: skip

    assert miss(dict(fitted.constants)) < 0.02 < miss(start)
    assert fitted.rows == tuple(sorted(run.key for run in runs))


def test_an_interval_is_what_four_fifths_of_many_misses_stay_within():
    misses = np.linspace(-0.5, 0.5, 2001)

    assert interval_half_width(misses) == pytest.approx(0.4, rel=0.01)


def test_few_rows_that_happen_to_fit_do_not_make_a_narrow_interval():
    assert interval_half_width(np.zeros(4)) > 4 * interval_half_width(np.zeros(400))
    assert interval_half_width(np.zeros(0)) == pytest.approx(P90_Z * 0.3)


@pytest.mark.parametrize("stack", [stack.name for stack in stack_catalog().stacks])
def test_every_stack_has_every_constant_of_its_law_and_says_where_it_comes_from(stack: str):
    found = calibration(stack)
    law = stack_catalog().stack(stack).law

    assert {f"{law}.{name}" for name in priors(law)} <= set(found.values)
    assert all(value >= 0 for value in found.values.values())
    assert found.fitted_from
    own = (FOLDER / "fitted" / law / f"{stack}.toml").exists() and not stack_catalog().stack(
        stack
    ).other_clusters
    assert (found.provenance == "fitted") == own == bool(found.rows)


def test_a_stack_that_borrows_has_a_wider_interval_than_its_lender():
    own, lent = calibration("vtrain"), calibration("gpus")

    assert lent.provenance == "borrowed"
    assert exp(lent.step_spread) > exp(own.step_spread)
    assert {**own.values} == {**lent.values}


def test_constants_move_no_further_than_their_priors_allow():
    spreads = 5.0  # beyond that a term is missing; ZeRO-3's share of network cards comes near
    for stack in stack_catalog().stacks:
        found = calibration(stack.name)
        for name, prior in priors(stack.law).items():
            start = prior_constants(stack.name)[f"{stack.law}.{name}"]
            value = found.values[f"{stack.law}.{name}"]
            if found.provenance == "fitted" and prior.spread and start * value:
                assert abs(np.log(value / start)) <= spreads * prior.spread, (stack.name, name)
