"""`windlass validate TABLE.csv` on the command line."""

import json
from pathlib import Path

import pytest

from command_line import Windlass
from validation.made_tables import GPT, write_table


def test_a_table_is_evaluated_beside_the_baseline_and_skip_reasons_are_listed(
    windlass: Windlass, tmp_path: Path
) -> None:
    rows = [{**GPT, "microbatch": str(b)} for b in (1, 2, 4)]
    write_table(tmp_path / "runs.csv", *rows, {**GPT, "device": "abacus"})

    done = windlass("validate", "runs.csv")

    assert done.returncode == 0, done.stderr
    for words in (
        "4 rows, 3 predicted", "constant", "in 80 %", "rank correlation", "worst predictions",
        "'abacus' is not known", ": 1 (line 5)",
    ):  # fmt: skip
        assert words in done.stdout


def test_json_has_every_row_with_its_interval_and_stack(windlass: Windlass, tmp_path: Path) -> None:
    write_table(tmp_path / "runs.csv", GPT, {**GPT, "hidden": ""})

    done = windlass("validate", "runs.csv", "--json")

    (table,) = json.loads(done.stdout)
    (row,) = table["predicted"]
    low, high = row["interval_80"]
    assert low < row["predicted_step_s"] < high
    assert (row["cluster"], row["stack"]) == ("vtrain", "megatron-deepspeed")
    assert table["skipped"][0]["reason"] == "`hidden` not published"


def test_a_table_that_cannot_be_read_does_not_hide_those_that_can(
    windlass: Windlass, tmp_path: Path
) -> None:
    write_table(tmp_path / "runs.csv", GPT)

    done = windlass("validate", "nowhere.csv", "runs.csv")

    assert done.returncode == 2
    assert "runs.csv: 1 rows, 1 predicted" in done.stdout
    assert "no file `nowhere.csv`" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere.csv",), "no file `nowhere.csv`"),
        (("her",), "did you mean `here`?"),
        (("here", "nowhere.csv"), "`here` cannot be combined"),
        (("other.csv", "--random", "3"), "leave them out with tables"),
        (("here", "--random", "0"), "ask for at least 1"),
        (("other.csv",), "`measured_step_s` are missing"),
        (("abacus.csv",), "no run can be predicted from its 2 rows"),
        (("abacus.csv",), "`windlass machines` lists those that are: 1 (line 2)"),
        (("abacus.csv",), "`t` = 'three' is not a number: 1 (line 3)"),
    ],
)
def test_what_cannot_be_validated_is_one_clear_message(
    windlass: Windlass, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "other.csv").write_text("model,device\na,b\n", encoding="utf-8")
    write_table(tmp_path / "abacus.csv", {**GPT, "device": "abacus"}, {**GPT, "t": "three"})

    done = windlass("validate", *words)

    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
