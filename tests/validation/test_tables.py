"""Accuracy of predictions on published tables against what was asked, if the tables are at hand.

The environment variable `WINDLASS_TABLES` names their folder; without it these tests are skipped.
"""

import contextlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from windlass.errors import InputErrors, RequestError
from windlass.validation.software_stacks import FOLDER
from windlass.validation.table_evaluation import TableEvaluation, evaluate_table

TABLES = Path(os.environ.get("WINDLASS_TABLES", "nowhere"))
ROOT = Path(__file__).parents[2]
DIGITS = 1e-3
"""Fitted files hold five digits; a fit's last step moves the fourth where a prior holds loosely."""

pytestmark = pytest.mark.skipif(not TABLES.is_dir(), reason="WINDLASS_TABLES names no folder")


def _evaluation(name: str) -> TableEvaluation:
    return evaluate_table(TABLES / name)


@pytest.mark.parametrize(
    ("table", "stack", "asked"),
    [
        ("korthikanti_2022.csv", "megatron-2022", 0.03),
        ("vtrain_single_a100.csv", "vtrain", 0.07),
        ("vtrain_multi_a100.csv", "vtrain", 0.08),
        ("bigscience_bloom_prequel_a100_80gb.csv", "bloom", 0.06),
        ("llm_foundry_mpt.csv", "mosaic-h100-80gb", 0.08),
        ("llm_foundry_mpt.csv", "mosaic-a100-80gb", 0.08),
        ("llm_foundry_mpt.csv", "mosaic-a100-40gb", 0.08),
        ("torchtitan.csv", "torchtitan", 0.12),
        ("mlperf_bert_resnet_v1.0_v1.1_v2.0.csv", "popart-bert", 0.10),
    ],
)
def test_step_times_of_test_rows_are_as_near_as_was_asked_and_nearer_than_a_constant(
    table: str, stack: str, asked: float
):
    (part,) = (part for part in _evaluation(table).by_stack if part.stack == stack)

    steps = part.accuracy.step_time
    assert steps is not None
    assert steps.mean <= asked
    assert steps.baseline is not None
    assert steps.mean < steps.baseline


@pytest.mark.parametrize(
    ("table", "asked"),
    [("bigscience_bloom_prequel_a100_80gb.csv", 0.08), ("torchtitan.csv", 0.08)],
)
def test_peak_memory_of_test_rows_is_as_near_as_was_asked(table: str, asked: float):
    memory = _evaluation(table).test_rows.memory

    assert memory is not None
    assert memory.mean <= asked


def test_every_run_out_of_memory_is_foreseen_without_false_alarms():
    memory = _evaluation("bigscience_bloom_prequel_a100_80gb.csv").all_rows.out_of_memory

    assert memory is not None
    assert memory.ran_out > 0
    assert (memory.foreseen, memory.false_alarms) == (memory.ran_out, 0)


def test_intervals_hold_four_fifths_of_the_rows_that_no_constant_has_seen():
    errors = []
    for path in TABLES.glob("*.csv"):
        with contextlib.suppress(RequestError, InputErrors):  # tables that state too little
            errors.append(_evaluation(path.name).test_rows.step_time)
    rows = sum(steps.rows for steps in errors if steps)
    inside = sum(steps.interval_coverage * steps.rows for steps in errors if steps)

    assert 0.75 <= inside / rows <= 0.85


@pytest.mark.slow
def test_fitting_again_gives_the_constants_that_are_kept(tmp_path: Path):
    subprocess.run(
        (sys.executable, str(ROOT / "benchmarks" / "calibrate.py"), str(TABLES),
         "--into", str(tmp_path)),
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip

    kept = FOLDER / "fitted"
    names = sorted(path.relative_to(kept) for path in kept.glob("*/*.toml"))
    assert names == sorted(path.relative_to(tmp_path) for path in tmp_path.glob("*/*.toml"))
    for name in names:
        before, after = (tomllib.loads((at / name).read_text()) for at in (kept, tmp_path))
        assert before["rows"] == after["rows"]
        assert after["constants"] == pytest.approx(before["constants"], rel=DIGITS)
        assert after["interval"] == pytest.approx(before["interval"], rel=DIGITS)
