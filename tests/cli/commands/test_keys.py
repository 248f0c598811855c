"""`windlass keys`: every key of a request."""

import json
import re
from pathlib import Path

import pytest

from windlass.cli.main import main
from windlass.document import leaf_fields
from windlass.schema.plan import Plan
from windlass.schema.request import Request


def test_every_key_is_listed_with_type_default_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["keys", "--json"])
    listed = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(listed) == [key for key, _ in leaf_fields(Request)]
    assert listed["train.betas"]["default"] == "open"
    formats = "float32, tf32, bfloat16, float16, float64, float8, float4"
    assert listed["precision"]["type"] == formats
    assert listed["train.batch"]["default"] == "open"
    assert all(entry["meaning"] for entry in listed.values())


def documented(page: Path) -> set[str]:
    """Keys that a table names: `train.steps`, or `train.betas`, `momentum` of one table."""
    names: set[str] = set()
    for line in page.read_text().splitlines():
        table = ""
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else ():
            table = f"{name.rpartition('.')[0]}." if "." in name else table
            names |= {name, table + name.rpartition(".")[2]}
    return names


def test_every_key_of_a_request_and_of_a_plan_has_a_row_in_the_documentation() -> None:
    folder = Path(__file__).parents[3] / "docs" / "reference"
    for document, page in ((Request, "request.md"), (Plan, "plan.md")):
        rows = documented(folder / page)
        keys = [key for key, _ in leaf_fields(document)]
        tables = {key: key.partition(".")[0] for key in keys}
        lacking = [key for key in keys if not {key, tables[key], f"{tables[key]}.*"} & rows]
        assert not lacking, page


def test_a_pattern_selects_keys_by_name_or_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "FSDP"])
    out = capsys.readouterr().out
    assert "sharding.parameters" in out
    assert "train.steps" not in out


def test_a_pattern_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["keys", "train.stepz"])
    assert end.value.code == 2
    assert "did you mean `train.steps`?" in capsys.readouterr().err
