"""Accuracy of predictions on published tables against what was asked, if the tables are at hand.

The environment variable `WINDLASS_TABLES` names their folder; without it these tests are skipped.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from windlass.validation.table_evaluation import TableEvaluation, evaluate_table

TABLES = Path(os.environ.get("WINDLASS_TABLES", "nowhere"))
VTRAIN, VTRAIN_HOSTS = "vtrain_single_a100.csv", "vtrain_multi_a100.csv"
BLOOM, MOSAIC = "bigscience_bloom_prequel_a100_80gb.csv", "llm_foundry_mpt.csv"
MLPERF, RECENT = "mlperf_bert_resnet_v1.0_v1.1_v2.0.csv", "recent_h100_gb200.csv"
KORTHIKANTI, TITAN = "korthikanti_2022.csv", "torchtitan.csv"
INSIDE = 0.75, 0.88
"""Share of rows inside 80 % intervals."""

pytestmark = pytest.mark.skipif(not TABLES.is_dir(), reason="WINDLASS_TABLES names no folder")


@cache
def evaluation(name: str) -> TableEvaluation:
    return evaluate_table(TABLES / name)


@pytest.mark.parametrize(
    ("table", "asked"),
    [
        (VTRAIN, 0.07), (VTRAIN_HOSTS, 0.08), (BLOOM, 0.06), (MOSAIC, 0.06), (TITAN, 0.10),
        (KORTHIKANTI, 0.03), (RECENT, 0.08),
    ],
)  # fmt: skip
def test_steps_that_no_constant_has_seen_are_as_near_as_asked_and_nearer_than_one_constant(
    table: str, asked: float
):
    steps = evaluation(table).test_rows.step_time

    assert steps is not None
    assert steps.mean <= asked
    assert steps.baseline is not None
    assert steps.mean < steps.baseline


def test_bert_on_ipu_pods_is_predicted_within_5_percent():
    (pods,) = (part for part in evaluation(MLPERF).by_cluster if part.cluster == "mlperf-ipu")

    assert pods.accuracy.step_time is not None
    assert pods.accuracy.step_time.mean <= 0.05


@pytest.mark.parametrize("table", [VTRAIN, VTRAIN_HOSTS, BLOOM, MOSAIC, KORTHIKANTI, TITAN])
def test_no_run_that_ran_is_refused(table: str):
    assert evaluation(table).skipped == ()


@pytest.mark.parametrize("table", [VTRAIN, VTRAIN_HOSTS, BLOOM, MOSAIC])
def test_80_percent_intervals_hold_about_so_many_rows_that_no_constant_has_seen(table: str):
    steps = evaluation(table).test_rows.step_time

    least, most = INSIDE
    assert steps is not None
    assert least <= steps.interval_coverage <= most


@pytest.mark.parametrize(("table", "asked"), [(BLOOM, 0.08), (TITAN, 0.10)])
def test_peak_memory_that_no_constant_has_seen_is_as_near_as_asked(table: str, asked: float):
    memory = evaluation(table).test_rows.memory

    assert memory is not None
    assert memory.mean <= asked


def test_steps_in_8_bits_are_as_near_as_asked():
    steps = evaluation(RECENT).by_precision["float8"].step_time

    assert steps is not None
    assert steps.mean <= 0.12


def test_every_run_out_of_memory_is_foreseen_without_false_alarms():
    memory = evaluation(BLOOM).all_rows.out_of_memory

    assert memory is not None
    assert memory.ran_out > 0
    assert (memory.foreseen, memory.false_alarms) == (memory.ran_out, 0)
