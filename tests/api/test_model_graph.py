"""What is said of a model of one's own when it is planned."""

from pathlib import Path

import pytest

from windlass import api

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


def test_a_plan_notes_the_layer_in_which_a_token_sees_its_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    for _ in ("captured", "cached"):
        (note,) = api.plan(f"{file}:build", *ALONE, machine="h100").notes
        assert note.startswith("in layer `1`, a `Mean`, a token sees")
        assert "causal mask" in note
