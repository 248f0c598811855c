"""The law of step time on GPUs: what must hold whatever its constants are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from validation.made_tables import GPT, run_of
from windlass.validation.predict_run import RunPrediction, predict_runs
from windlass.validation.published_run import PublishedRun, RunConfig
from windlass.validation.stack_constants import calibration

SUMMED = 1e-9
"""Sums of a dozen numbers in float64."""
TILED = 0.02
"""Products of one block differ a little in what their last wave and their depth cost."""
TITAN = {
    **GPT, "source": "torchtitan", "device": "H100-SXM5-96GB", "t": "8", "d": "8", "zero": "3",
    "microbatch": "8", "sequence_parallel": "yes",
}  # fmt: skip


@pytest.fixture
def gpt(tmp_path: Path) -> PublishedRun:
    return run_of(tmp_path)


def _predict_with(run: PublishedRun, **changes: float) -> RunPrediction:
    config: RunConfig = replace(run.config, **changes)
    (prediction,) = predict_runs([replace(run, config=config)])
    return prediction


def test_terms_sum_to_the_step(gpt: PublishedRun):
    prediction = _predict_with(gpt, pipeline=2.0, replicas=16.0, accumulation=8.0)

    assert sum(prediction.by_term.values()) == pytest.approx(prediction.step_seconds, rel=SUMMED)
    assert min(prediction.by_term.values()) >= 0.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 6), st.integers(1, 6))
def test_the_same_batch_on_more_replicas_is_never_slower_on_one_host(
    gpt: PublishedRun, log_accumulation: int, micro: int
):
    accumulation = 2.0 ** (log_accumulation + 1)
    fewer = _predict_with(
        gpt, devices=4.0, tensor=2.0, replicas=2.0, accumulation=accumulation, micro=float(micro)
    )
    more = _predict_with(
        gpt, devices=8.0, tensor=2.0, replicas=4.0, accumulation=accumulation / 2,
        micro=float(micro),
    )  # fmt: skip

    assert more.step_seconds <= fewer.step_seconds


def test_more_micro_batches_take_longer_and_fill_the_pipeline_better(gpt: PublishedRun):
    few = _predict_with(gpt, pipeline=4.0, replicas=8.0, accumulation=4.0)
    many = _predict_with(gpt, pipeline=4.0, replicas=8.0, accumulation=16.0)

    assert few.step_seconds < many.step_seconds < 4 * few.step_seconds


def test_recompute_costs_a_forward_pass_and_saves_memory(gpt: PublishedRun):
    recomputed, kept = (
        _predict_with(gpt, recompute_share=1.0),
        _predict_with(gpt, recompute_share=0.0),
    )

    assert 1.2 < recomputed.step_seconds / kept.step_seconds < 1.5
    assert (recomputed.peak_bytes or 0) < (kept.peak_bytes or 0)


def test_each_zero_stage_saves_memory(gpt: PublishedRun):
    peaks = [_predict_with(gpt, zero=float(stage)).peak_bytes or 0.0 for stage in (0, 1, 2, 3)]

    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_recompute_that_stops_early_skips_the_last_product_and_the_last_sum(gpt: PublishedRun):
    def of_layers(stop: float) -> float:
        values = {**calibration("vtrain").values, "gpu.early_stop": stop}
        (prediction,) = predict_runs(
            [gpt], lambda stack: replace(calibration(stack), values=values)
        )
        return prediction.by_term["products"]

    kept = _predict_with(gpt, recompute_share=0.0).by_term["products"]
    whole, early = of_layers(0.0) - kept, of_layers(1.0) - kept
    # The last product has 4 of a block's 12 d^2 weights, and tiles cost all of them alike here.
    assert early / whole == pytest.approx(8 / 12, rel=TILED)


def test_row_scales_cost_more_than_tensor_scales_and_both_gain_over_16_bits(tmp_path: Path):
    def step(precision: str) -> float:
        run = run_of(
            tmp_path, TITAN, precision=precision, hidden=8192, layers=80, heads=64, seq=8192
        )
        (prediction,) = predict_runs([run])
        return (
            prediction.by_term["products"]
            + prediction.by_term["traffic"]
            + prediction.by_term["slices"]
        )

    assert step("float8 tensorwise") < step("float8 rowwise") < 1.1 * step("bf16")


def test_rings_that_share_cards_with_several_ranks_a_host_take_longer(gpt: PublishedRun):
    def over_plain(stack: str, tensor: float) -> float:
        run = replace(gpt, config=replace(gpt.config, tensor=tensor, replicas=64.0 / tensor))
        known = calibration(stack)
        plain = replace(known, values={**known.values, "gpu.crowded": 0.0})
        (prediction,), (alone,) = (
            predict_runs([run], lambda _, by=by: by) for by in (known, plain)
        )
        return prediction.by_term["replicas"] / alone.by_term["replicas"]

    longer = 1.0 + calibration("vtrain").values["gpu.crowded"]
    assert longer > 1.0
    shares = [over_plain("vtrain", tensor) for tensor in (1.0, 2.0, 4.0, 8.0)]
    assert shares == pytest.approx([1.0, longer, longer, 1.0])


def test_no_ring_is_crowded_if_each_device_has_its_own_network_card(gpt: PublishedRun):
    run = replace(gpt, stack="megatron-2021")
    known = calibration(run.stack)
    plain = replace(known, values={**known.values, "gpu.crowded": 0.0})

    (prediction,), (alone,) = (predict_runs([run], lambda _, by=by: by) for by in (known, plain))
    assert prediction.step_seconds == pytest.approx(alone.step_seconds, rel=SUMMED)


def test_a_last_stage_with_fewer_layers_hides_the_head(tmp_path: Path):
    # BLOOM's early plans: 78 layers over 12 stages leave one layer beside the vocabulary of 250k.
    uneven = run_of(
        tmp_path, layers=78, hidden=13824, heads=64, vocab="250k", t=4, p=12, d=8, n_devices=384,
        global_batch=2048, microbatch=2,
    )  # fmt: skip
    (prediction,) = predict_runs([uneven])

    assert prediction.by_term["head"] == 0.0


def test_predicting_all_rows_at_once_equals_predicting_each_alone(tmp_path: Path):
    runs = [run_of(tmp_path, t=t, d=64 // t, microbatch=b) for t in (1, 2, 8) for b in (1, 2, 8)]

    together = [prediction.step_seconds for prediction in predict_runs(runs)]

    alone = [prediction.step_seconds for run in runs for prediction in predict_runs([run])]
    assert np.allclose(together, alone, rtol=SUMMED, atol=0.0)


def test_a_row_without_micro_batch_takes_the_fastest_that_fits(tmp_path: Path):
    open_row = {name: cell for name, cell in GPT.items() if name != "microbatch"}
    (prediction,) = predict_runs([run_of(tmp_path, open_row)])

    stated = [predict_runs([run_of(tmp_path, microbatch=b)])[0] for b in (1, 2, 4, 8)]
    fastest = min((one for one in stated if one.fits), key=lambda one: one.step_seconds)
    assert prediction.config == fastest.config
