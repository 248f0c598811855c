"""Runs of image models as plans: published steps, and what holds whatever the constants."""

from dataclasses import replace
from pathlib import Path

import pytest

from validation.made_tables import run_of
from windlass.validation.published_plan import published_plan, step_seconds
from windlass.validation.published_run import PublishedRun

RESNET = {
    "source": "mlcommons/training_results_v1.1", "model": "resnet50", "global_batch": "3264",
    "microbatch": "408", "t": "1", "p": "1", "d": "8", "device": "NVIDIA A100-SXM4-80GB (400W)",
    "n_devices": "8", "measured_step_s": "0.12385",
}  # fmt: skip
"""NVIDIA's own submission of MLPerf Training v1.1; its constants were fitted to other rows."""
ASKED = 0.08


def predicted(run: PublishedRun, **changes: float) -> float:
    return step_seconds(published_plan(run, replace(run.config, **changes)))


def test_a_row_of_an_image_model_needs_no_shape(tmp_path: Path):
    run = run_of(tmp_path, RESNET)

    assert (run.config.micro, run.config.accumulation, run.config.replicas) == (408, 1, 8)
    assert predicted(run) == pytest.approx(run.step_seconds, rel=ASKED)


def test_ipus_have_few_images_at_once_unless_a_row_says_more(tmp_path: Path):
    pod = {**RESNET, "device": "Graphcore Bow IPU", "n_devices": "16", "d": "16", "microbatch": ""}

    run = run_of(tmp_path, pod, global_batch=1920)

    assert (run.config.micro, run.config.accumulation) == (20, 6)
    assert run.cluster.stack == "tensorflow-ipu"


def test_more_images_take_longer_and_less_for_each(tmp_path: Path):
    run = run_of(tmp_path, RESNET)
    few, many = predicted(run, micro=16.0), predicted(run, micro=256.0)

    assert few < many < 16 * few


def test_no_step_is_faster_than_its_flop_at_the_peak(tmp_path: Path):
    assert predicted(run_of(tmp_path, RESNET)) > 3 * 8.2e9 * 408 / 312e12
