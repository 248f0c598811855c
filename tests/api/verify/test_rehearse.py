"""Rehearsals of plans for a large machine, also of plans that do not fit it."""

from pathlib import Path

import pytest

from windlass import api
from windlass.errors import PlanError

OVERRIDES = ("parallel.data=4", "phases=1", "train.batch=16")
"""Each IPU has 897 MiB, and the model takes over 12 bytes per parameter on each of them."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_plan_that_does_not_fit_is_rehearsed_with_a_note():
    plan, (note,) = api.rehearsal(api.make_request("gpt2-355m", *OVERRIDES, machine="ipu-pod4"))
    assert plan.parallel.data == 4
    assert note.startswith("`gpt2-355m` does not fit")
    assert "897 MiB" in note
    assert note.endswith("planned as if each device had enough memory")


def test_a_plan_that_does_not_fit_the_requested_budget_is_refused():
    request = api.make_request("gpt2-355m", *OVERRIDES, machine="ipu-pod4", memory="500MiB")
    with pytest.raises(PlanError, match=r"does not fit.*500 MiB"):
        api.rehearsal(request)
