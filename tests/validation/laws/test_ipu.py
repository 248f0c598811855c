"""The law of step time on pods: where its sums over replicas go, and how full a stage is."""

from dataclasses import replace
from pathlib import Path

import pytest

from validation.made_tables import BERT, run_of
from windlass.validation.laws.ipu import max_stage_layers
from windlass.validation.predict_run import predict_runs
from windlass.validation.published_run import PublishedRun, RunConfig
from windlass.validation.software_stacks import stack_catalog
from windlass.validation.stack_constants import calibration

SUMMED = 1e-9
"""Sums of a dozen numbers in float64."""


@pytest.fixture
def bert(tmp_path: Path) -> PublishedRun:
    return run_of(tmp_path, BERT)


def summing_seconds(run: PublishedRun, **changes: float) -> float:
    config: RunConfig = replace(run.config, **changes)
    (prediction,) = predict_runs([replace(run, config=config)])
    return prediction.by_term["replicas"]


def test_rings_of_all_stages_share_what_joins_two_hosts(bert: PublishedRun):
    device = stack_catalog().device(bert.device)
    few = summing_seconds(bert, devices=16.0, pipeline=4.0, replicas=4.0)
    many = summing_seconds(bert, devices=32.0, pipeline=8.0, replicas=4.0)

    weights = 2.0 * (
        bert.config.max_stage_layers * bert.shape.parameters_per_block
        + bert.shape.vocabulary_parameters / 4.0
    )
    share = calibration(bert.stack).values["ipu.ring"]
    once_around = 2.0 * weights * 3.0 / 4.0
    assert few == pytest.approx(once_around / (device.rack_rate / 4.0 * share), rel=SUMMED)
    lighter = weights - 2.0 * bert.shape.vocabulary_parameters / 8.0
    assert many / few == pytest.approx(2.0 * lighter / weights, rel=SUMMED)


def test_replicas_of_one_host_sum_over_its_own_links(bert: PublishedRun):
    within = summing_seconds(bert, devices=4.0, pipeline=2.0, replicas=2.0)
    between = summing_seconds(bert, devices=8.0, pipeline=2.0, replicas=4.0)

    device = stack_catalog().device(bert.device)
    bytes_sent = 1.5  # of a ring of four over one of two
    assert between / within == pytest.approx(
        bytes_sent * device.intra_host_rate / (device.rack_rate / 2.0), rel=SUMMED
    )


def test_a_feed_forward_part_fills_a_stage_by_its_share_of_the_flop(bert: PublishedRun):
    def layers(attentions: int, forwards: int, sequence: float) -> float:
        shape = replace(bert.shape, sequence=sequence)
        return max_stage_layers(f"layers_per_ipu)=[[0, [{attentions}, {forwards}]]]", shape, 1.0)

    assert layers(3, 3, 512.0) == pytest.approx(3.0)
    # The feed-forward part has 16 d^2 of a token's 24 d^2 + 4 s d FLOP forward.
    assert layers(0, 1, 512.0) == pytest.approx(16 * 1024 / (24 * 1024 + 4 * 512))
    assert layers(1, 0, 4096.0) > layers(1, 0, 512.0)
