"""`bisect` names the difference between two runs that makes one of them bad."""

import json
import shutil
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.judging.differences.factors import (
    describe_untested,
    find_factors,
    mixed_request,
    mixed_variables,
)

MODEL, *OVERRIDES = TINY


def trained(home: Path, *overrides: str) -> Path:
    run = windlass.train(MODEL, *OVERRIDES, f"data.source={home / 'text'}", *overrides,
                         root=home / "runs")  # fmt: skip
    list(run)
    return run.folder


def test_factors_are_what_a_run_can_have_from_either_side(home: Path):
    good = trained(home, "train.steps=1")
    bad = home / "runs" / "bad"
    shutil.copytree(good, bad)
    request = (good / "request.toml").read_text()
    assert "evaluate_every = 100" in request
    (bad / "request.toml").write_text(
        request.replace("evaluate_every = 100", "evaluate_every = 30")
    )
    content = json.loads((bad / "environment.json").read_text())
    content["packages"]["numpy"] = "0.0.1"
    content["variables"] = {"OMP_WAIT_POLICY": "passive"}
    (bad / "environment.json").write_text(json.dumps(content))

    records = windlass.load(good), windlass.load(bad)
    found = list(find_factors(*records, with_code=True))
    names = [factor.name for factor in found]
    assert names[0] == "train.evaluate_every"
    assert names[-1] == "code"
    assert "variable OMP_WAIT_POLICY" in names
    assert "plan" not in names  # both have one, and the request says what differs
    assert "package numpy" in " ".join(describe_untested(*records))
    assert mixed_request(*records, [])["train"]["evaluate_every"] == 100
    assert mixed_request(*records, found)["train"]["evaluate_every"] == 30
    assert mixed_variables(*records, [])["OMP_WAIT_POLICY"] != "passive"
    assert mixed_variables(*records, found)["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.slow
def test_the_learning_rate_is_named_among_innocent_changes(home: Path):
    good = trained(home, "train.steps=20", "train.learning_rate=0.001")
    bad = trained(
        home, "train.steps=20", "train.learning_rate=0.3", "train.evaluate_every=7",
        "train.save_every=11",
    )  # fmt: skip
    found = windlass.bisect(good, bad, metric="loss", root=home / "runs")
    assert found.culprits == ("train.learning_rate",), found.verdict
    assert set(found.factors) >= {"train.evaluate_every", "train.learning_rate"}
