"""The law of step time on GPUs: what must hold whatever its constants are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from published.made_tables import GPT, run_of
from windlass.published.predict import Predicted, predict
from windlass.published.run import Cut, Run

SUMMED = 1e-9
"""Sums of a dozen numbers in float64."""


@pytest.fixture
def gpt(tmp_path: Path) -> Run:
    return run_of(tmp_path)


def _cut(run: Run, **changes: float) -> Predicted:
    cut: Cut = replace(run.cut, **changes)
    (found,) = predict([replace(run, cut=cut)])
    return found


def test_terms_sum_to_the_step(gpt: Run):
    found = _cut(gpt, pipeline=2.0, replicas=16.0, accumulation=8.0)

    assert sum(found.by_term.values()) == pytest.approx(found.step_seconds, rel=SUMMED)
    assert min(found.by_term.values()) >= 0.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 6), st.integers(1, 6))
def test_the_same_batch_on_more_replicas_is_never_slower_on_one_host(
    gpt: Run, log_accumulation: int, micro: int
):
    accumulation = 2.0 ** (log_accumulation + 1)
    fewer = _cut(
        gpt, devices=4.0, tensor=2.0, replicas=2.0, accumulation=accumulation, micro=float(micro)
    )
    more = _cut(
        gpt, devices=8.0, tensor=2.0, replicas=4.0, accumulation=accumulation / 2,
        micro=float(micro),
    )  # fmt: skip

    assert more.step_seconds <= fewer.step_seconds


def test_more_micro_batches_take_longer_and_fill_the_pipeline_better(gpt: Run):
    few = _cut(gpt, pipeline=4.0, replicas=8.0, accumulation=4.0)
    many = _cut(gpt, pipeline=4.0, replicas=8.0, accumulation=16.0)

    assert few.step_seconds < many.step_seconds < 4 * few.step_seconds


def test_recompute_costs_a_forward_pass_and_saves_memory(gpt: Run):
    again, kept = _cut(gpt, again=1.0), _cut(gpt, again=0.0)

    assert 1.2 < again.step_seconds / kept.step_seconds < 1.5
    assert (again.peak_bytes or 0) < (kept.peak_bytes or 0)


def test_sharing_optimizer_state_saves_memory_in_the_order_of_zero(gpt: Run):
    peaks = [_cut(gpt, zero=float(stage)).peak_bytes or 0.0 for stage in (0, 1, 2, 3)]

    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_a_last_stage_with_fewer_layers_hides_the_head(tmp_path: Path):
    # BLOOM's early plans: 78 layers over 12 stages leave one layer beside the vocabulary of 250k.
    uneven = run_of(
        tmp_path, layers=78, hidden=13824, heads=64, vocab="250k", t=4, p=12, d=8, n_devices=384,
        global_batch=2048, microbatch=2,
    )  # fmt: skip
    (found,) = predict([uneven])

    assert found.by_term["head"] == 0.0


def test_predictions_of_all_rows_at_once_are_those_of_each_alone(tmp_path: Path):
    runs = [run_of(tmp_path, t=t, d=64 // t, microbatch=b) for t in (1, 2, 8) for b in (1, 2, 8)]

    together = [found.step_seconds for found in predict(runs)]

    alone = [found.step_seconds for run in runs for found in predict([run])]
    assert np.allclose(together, alone, rtol=SUMMED, atol=0.0)


def test_a_row_without_micro_batch_takes_the_fastest_that_fits(tmp_path: Path):
    open_row = {name: cell for name, cell in GPT.items() if name != "microbatch"}
    (found,) = predict([run_of(tmp_path, open_row)])

    stated = [predict([run_of(tmp_path, microbatch=b)])[0] for b in (1, 2, 4, 8)]
    fastest = min((one for one in stated if one.fits), key=lambda one: one.step_seconds)
    assert found.cut == fastest.cut
