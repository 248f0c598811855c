"""Image models: what must hold of their step time whatever the constants are."""

from dataclasses import replace
from pathlib import Path

import pytest

from validation.made_tables import run_of
from windlass.validation.predict_run import predict_runs
from windlass.validation.published_run import PublishedRun

RESNET = {
    "source": "mlcommons/training_results_v1.1", "model": "resnet50", "global_batch": "3264",
    "microbatch": "408", "t": "1", "p": "1", "d": "8", "device": "NVIDIA A100-SXM4-80GB",
    "n_devices": "8", "measured_step_s": "0.124",
}  # fmt: skip


def _seconds(run: PublishedRun, **changes: float) -> float:
    return predict_runs([replace(run, config=replace(run.config, **changes))])[0].step_seconds


def test_a_row_of_an_image_model_needs_no_shape(tmp_path: Path):
    found = run_of(tmp_path, RESNET)

    assert found.stack == "images-gpus"
    assert (found.config.micro, found.config.accumulation, found.config.replicas) == (408, 1, 8)
    assert run_of(tmp_path, RESNET, device="Graphcore Bow IPU").stack == "images-pods"


def test_more_images_take_longer_and_less_for_each(tmp_path: Path):
    run = run_of(tmp_path, RESNET)
    few, many = _seconds(run, micro=16.0), _seconds(run, micro=256.0)

    assert few < many < 16 * few


def test_no_step_is_faster_than_its_flop_at_the_peak(tmp_path: Path):
    (found,) = predict_runs([run_of(tmp_path, RESNET)])

    at_peak = 3 * 8.2e9 * 408 / 312e12
    assert found.by_term["products"] > at_peak
    assert sum(found.by_term.values()) == pytest.approx(found.step_seconds)
