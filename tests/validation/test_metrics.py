"""Metrics of predictions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from validation.made_tables import GPT, run_of, write_table
from windlass.validation.metrics import (
    out_of_memory_accuracy,
    rank_accuracy,
    repeat_noise,
    spearman,
    step_errors,
)
from windlass.validation.predict_run import RunPrediction, predict_run
from windlass.validation.table_evaluation import evaluate_table


@pytest.fixture
def exact(tmp_path: Path) -> list[RunPrediction]:
    """Predictions that are right, of one model on one machine."""
    runs = [run_of(tmp_path, microbatch=b, t=t, d=64 // t) for b in (1, 4, 8) for t in (1, 8)]
    found = [predict_run(run) for run in runs]
    return [
        replace(one, run=replace(one.run, step_seconds=one.step_seconds)) for one in found
    ]  # fmt: skip


def _slower(one: RunPrediction, factor: float) -> RunPrediction:
    """The same prediction of a run that took so many times as long."""
    return replace(one, run=replace(one.run, step_seconds=one.step_seconds * factor))


def test_right_predictions_have_no_error_and_lie_in_their_intervals(exact: list[RunPrediction]):
    errors, order = step_errors(exact), rank_accuracy(exact)

    assert errors is not None
    assert order is not None
    assert (errors.mean, errors.bias, errors.interval_coverage) == (0.0, 0.0, 1.0)
    assert (order.spearman, order.ordered_share, order.picked_slowdown) == pytest.approx(
        (1.0, 1.0, 0.0)
    )


def test_an_error_is_predicted_over_measured_less_one(exact: list[RunPrediction]):
    errors = step_errors([_slower(exact[0], 2.0), _slower(exact[1], 0.5)])

    assert errors is not None
    assert errors.mean == pytest.approx((0.5 + 1.0) / 2)
    assert errors.bias == pytest.approx((-0.5 + 1.0) / 2)
    assert errors.interval_coverage == 0.0


def test_one_constant_for_all_is_right_where_time_is_flop_over_devices(exact: list[RunPrediction]):
    shape = exact[0].run.shape
    alike = [
        replace(one, run=replace(one.run, step_seconds=3.0, shape=shape)) for one in exact
    ]  # fmt: skip

    errors = step_errors(alike)

    assert errors is not None
    assert errors.baseline == pytest.approx(0.0, abs=1e-12)


def test_the_picked_run_is_the_one_predicted_fastest_over_the_one_that_was(
    exact: list[RunPrediction],
):
    fastest = min(exact, key=lambda one: one.step_seconds)
    others = [one for one in exact if one is not fastest]
    truly = min(one.step_seconds for one in others)

    order = rank_accuracy([_slower(fastest, 10.0), *others])

    assert order is not None
    assert order.picked_slowdown == pytest.approx(10.0 * fastest.step_seconds / truly - 1.0)


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=20))
def test_rank_correlation_sees_only_the_order(whole: list[int]):
    values = np.array(whole, dtype=float)  # whole, so that their logarithms differ where they do

    assert spearman(values, np.log(values) * 5.0) == pytest.approx(1.0)
    if np.ptp(values):
        assert spearman(values, -values) == pytest.approx(-1.0)


def test_the_spread_of_repeats_of_one_plan_is_the_noise(exact: list[RunPrediction]):
    one = exact[0].run
    repeats = [replace(one, step_seconds=float(np.exp(at))) for at in (-0.1, 0.0, 0.1)]

    assert repeat_noise(repeats) == pytest.approx(0.1)
    assert repeat_noise([run.run for run in exact]) == 0.0


def test_a_run_out_of_memory_is_foreseen_only_if_it_was_predicted_not_to_fit(
    exact: list[RunPrediction],
):
    failed = replace(exact[0].run, out_of_memory=True, step_seconds=None)

    calls = out_of_memory_accuracy(
        [replace(exact[0], run=failed, fits=False), replace(exact[1], run=failed, fits=True),
         replace(exact[2], fits=False), replace(exact[3], fits=True)]
    )  # fmt: skip

    assert calls is not None
    assert (calls.ran_out, calls.foreseen, calls.ran, calls.false_alarms) == (2, 1, 2, 1)


def test_every_row_of_a_table_is_predicted_or_skipped_with_a_reason(tmp_path: Path):
    rows = [GPT, {**GPT, "device": "abacus"}, {**GPT, "measured_step_s": ""}, {**GPT, "t": "3"}]

    evaluation = evaluate_table(write_table(tmp_path / "runs.csv", *rows))

    assert len(evaluation.predictions) + len(evaluation.skipped) == evaluation.rows == 4
    assert [row.line for row in evaluation.skipped] == [3, 4, 5]
