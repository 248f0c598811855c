"""What is said of a model of one's own when it is planned."""

from pathlib import Path

import pytest

from factories import tiny_graph
from windlass import api
from windlass.jobs.model_graph import _with_look_ahead, model_notes
from windlass.jobs.objects import NO_OBJECTS
from windlass.schema import ModelIdentity

MODEL = """
from torch import nn

class Mean(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).mean(1, keepdim=True)

def build():
    return nn.Sequential(nn.Embedding(300, 16), Mean(16, 16), nn.Linear(16, 300))
"""
ALONE = ("train.batch=2", "train.sequence=16", "parallel.tensor=1", "parallel.data=1",
         "parallel.pipeline=1")  # fmt: skip


@pytest.fixture
def request_of(tmp_path: Path) -> ModelIdentity:
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    return ModelIdentity(name=f"{file}:build")


def test_a_note_names_the_layer_in_which_a_token_sees_its_successors(
    request_of: ModelIdentity,
) -> None:
    graph = _with_look_ahead(tiny_graph(), request_of, NO_OBJECTS)
    (note,) = model_notes(graph)
    assert note.startswith("in layer `1`, a `Mean`, a token sees the tokens after it")
    assert "causal mask" in note
    assert graph.label == tiny_graph().label


def test_a_model_of_the_catalogue_is_not_tried() -> None:
    graph = _with_look_ahead(tiny_graph(), ModelIdentity(name="bert-tiny"), NO_OBJECTS)
    assert model_notes(graph) == ()


@pytest.mark.slow
def test_a_plan_has_the_note_also_when_its_graph_is_cached(
    request_of: ModelIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in ("captured", "cached"):
        (note,) = api.plan(request_of.name, *ALONE, machine="h100").notes
        assert "a token sees the tokens after it" in note
