"""Fitting constants by least squares."""

from collections.abc import Mapping

import numpy as np
import pytest

from fitting.least_squares import Column, Prior, fit_constants

FOUND = 0.01
"""A prior of spread 1 beside forty exact rows pulls a constant by less than a percent."""
LOOSE = Prior(1.0, 1.0)
SIZES = np.geomspace(1.0, 100.0, 40)


def line(given: Mapping[str, float]) -> Column:
    return given["each"] * SIZES + given["fixed"]


def test_constants_that_made_the_rows_are_found_again():
    measured = line({"each": 0.3, "fixed": 2.0})

    found = fit_constants(line, measured, {"each": LOOSE, "fixed": LOOSE}).constants

    assert found == pytest.approx({"each": 0.3, "fixed": 2.0}, rel=FOUND)


def test_a_few_disturbed_runs_hardly_move_a_constant():
    measured = line({"each": 0.3, "fixed": 2.0})
    measured[::10] *= 3.0

    found = fit_constants(line, measured, {"each": LOOSE, "fixed": LOOSE}).constants

    assert line(found) == pytest.approx(line({"each": 0.3, "fixed": 2.0}), rel=0.1)


def test_a_constant_that_no_row_speaks_of_stays_at_its_prior():
    prior = {"each": LOOSE, "fixed": LOOSE, "idle": Prior(7.0, 1.0)}

    found = fit_constants(line, line({"each": 0.3, "fixed": 2.0}), prior).constants

    assert found["idle"] == pytest.approx(7.0, rel=1e-9)


def test_a_tight_prior_gives_way_less_than_a_loose_one():
    measured = line({"each": 2.0, "fixed": 1.0})[:2]
    tight = Prior(1.0, 0.05)

    def law(given: Mapping[str, float]) -> Column:
        return line(given)[:2]

    held = fit_constants(law, measured, {"each": tight, "fixed": tight}).constants
    free = fit_constants(law, measured, {"each": LOOSE, "fixed": LOOSE}).constants

    assert 1.0 < held["each"] < free["each"]
