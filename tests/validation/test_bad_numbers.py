"""Rows with numbers that no run has: each gives its reason, at once, and is never predicted."""

from pathlib import Path

import pytest

from validation.made_tables import BERT, GPT, write_table
from windlass.errors import InputErrors
from windlass.validation.csv_table import COLUMNS
from windlass.validation.table_evaluation import evaluate_table

COUNTS = (
    "params", "layers", "hidden", "heads", "seq", "vocab", "global_batch", "microbatch", "t", "p",
    "d", "interleave", "n_devices",
)  # fmt: skip
NUMBERS = (
    *COUNTS, "zero", "measured_step_s", "measured_throughput", "peak_memory_gb", "peak_memory_gib",
    "grad_accum", "context_parallel", "ffn", "kv_heads",
)  # fmt: skip
IMAGES = {
    **GPT, "source": "mlcommons/training_results_v1.1", "model": "resnet50", "t": "1", "d": "8",
    "n_devices": "8", "layers": "", "hidden": "", "heads": "", "seq": "", "zero": "",
}  # fmt: skip


def reason(folder: Path, row: dict[str, str]) -> str:
    more = tuple(name for name in row if name not in COLUMNS)
    with pytest.raises(InputErrors, match="no run can be predicted from its row") as caught:
        evaluate_table(write_table(folder / "bad.csv", row, more=more))
    (_, why) = caught.value.messages
    return why


@pytest.mark.parametrize("cell", ["nan", "inf", "-3", "1e400"])
@pytest.mark.parametrize("base", [GPT, BERT, IMAGES], ids=["gpt", "bert", "images"])
def test_a_number_below_zero_without_end_or_none_is_named_in_any_column(
    tmp_path: Path, base: dict[str, str], cell: str
):
    for column in NUMBERS:
        why = reason(tmp_path, {**base, column: cell})

        assert f"`{column}` = '{cell}' is not a number from 0 to 1e+18" in why


@pytest.mark.parametrize("cell", ["0", "0.5", "1e-300"])
def test_a_count_below_one_is_named(tmp_path: Path, cell: str):
    for column in COUNTS:
        base = {**GPT, "layers": ""} if column == "params" else GPT

        assert f"`{column}` = '{cell}'" in reason(tmp_path, {**base, column: cell})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": "1000000000000"}, "`layers` of 1e+12 is more than"),
        ({"layers": "", "params": "1e18"}, "`layers` of 8.83032e+09 is more than"),
        ({"interleave": "1000000000"}, "`interleave` of 1e+09 is more than"),
        ({"p": "1e9", "n_devices": "64e9"}, "`p` of 1e+09 is more than"),
        ({"n_devices": "1e12", "d": "5e11"}, "125000000000 is not a number of hosts"),
        ({"hidden": "", "seq": ""}, "`hidden`, `seq` not published"),
    ],
)
def test_more_than_any_run_has_and_less_than_a_run_needs_is_told(
    tmp_path: Path, changes: dict[str, str], told: str
):
    assert told in reason(tmp_path, {**GPT, **changes})


def test_a_huge_batch_or_width_takes_long_to_run_and_not_to_predict(tmp_path: Path):
    rows = [
        {**GPT, "p": "8", "t": "8", "d": "1", "layers": "32", "global_batch": "1000000000000"},
        {**GPT, "hidden": "1000000000"},
    ]

    found = evaluate_table(write_table(tmp_path / "huge.csv", *rows)).predictions

    assert all(one.step_seconds > 1e5 for one in found)
    assert found[1].fits is False
