"""What is rehearsed of a large machine's plan, also where the plan does not fit it."""

from pathlib import Path

import pytest

from windlass import api
from windlass.errors import PlanError

CUT = ("parallel.data=4", "phases=1", "train.batch=16")
"""Of a model that takes 12 bytes and more of each parameter on every IPU, with 897 MiB."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_cut_that_does_not_fit_is_rehearsed_all_the_same_and_that_is_said():
    plan, (note,) = api.rehearsal(api.make_request("gpt2-355m", *CUT, machine="ipu-pod4"))
    assert plan.parallel.data == 4
    assert note.startswith("`gpt2-355m` does not fit")
    assert "897 MiB" in note
    assert note.endswith("planned as if each device had room enough")


def test_a_cut_that_does_not_fit_the_budget_that_is_asked_for_is_refused():
    request = api.make_request("gpt2-355m", *CUT, machine="ipu-pod4", memory="500MiB")
    with pytest.raises(PlanError, match=r"does not fit.*500 MiB"):
        api.rehearsal(request)
