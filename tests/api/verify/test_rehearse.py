"""Rehearsals of plans for a large machine, also of plans that do not fit it."""

from pathlib import Path

import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from hub_folders import gpt2_folder
from windlass import api
from windlass.errors import PlanError
from windlass.schema import ModelIdentity, Request, SparsityRequest

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


def test_a_downscaled_plan_of_a_sparse_model_is_dense_and_says_so(home: Path):
    graph = tiny_graph(layers=24).model_copy(update={"name": "gpt3-175b"})
    large = tiny_plan(graph, tiny_machine(devices=2), pipeline=2, accumulation=8)
    sparse = ModelIdentity(name="gpt3-175b", sparsity=SparsityRequest())
    request = Request.resolve(None, [f"data.source={home / 'text'}"])
    planned, notes = api.downscale_plan(large.model_copy(update={"model": sparse}), request)
    assert "all weights are kept: a downscaled plan is rehearsed dense" in notes
    assert planned.plan.model is not None
    assert planned.plan.model.sparsity is None


def test_a_plan_of_a_hugging_face_folder_is_rehearsed_in_its_own_shape(home: Path):
    name = gpt2_folder(home / "gpt2")
    large = tiny_plan(
        tiny_graph(layers=24).model_copy(update={"name": name}),
        tiny_machine(devices=2),
        pipeline=2,
        accumulation=8,
    )
    request = Request.resolve(None, [f"data.source={home / 'text'}"])

    planned, notes = api.downscale_plan(large, request)

    assert planned.plan.model is not None
    assert planned.plan.model.name == f"{name}/config.json"
    assert not any("stand in" in note for note in notes)
