"""Which batches a run takes."""

import json
from pathlib import Path

import pytest

import windlass
from windlass.errors import PlanError


@pytest.mark.slow
def test_packed_text_is_refused_for_a_model_that_predicts_each_next_token(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": f"one or two words {n} " * 9}) for n in range(60)]
    path.write_text("\n".join(lines), encoding="utf-8")
    settings = (f"data.source={path}", "data.tokenizer=byte", "data.packing=true")

    with pytest.raises(PlanError, match=r"set `data\.format` to `chat`"):
        windlass.train(
            "gpt-tiny", *settings, "train.steps=1", "compile=false", folder=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_of_packed_text_keeps_its_packing_factor(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": "one or two words " * (1 + n % 3)}) for n in range(60)]
    path.write_text("\n".join(lines), encoding="utf-8")
    settings = (f"data.source={path}", "data.tokenizer=byte", "data.packing=true")
    small = ("model.layers=1", "model.width=32", "model.heads=2", "model.vocabulary=258")

    run = windlass.train(
        "bert-tiny", *settings, *small, "train.steps=1", "train.batch=2", "train.sequence=128",
        "compile=false", folder=tmp_path / "run",
    )  # fmt: skip

    assert len(list(run)) == 1
    factor = windlass.load(tmp_path / "run").meta["packing_factor"]
    assert factor > 1.5
    assert any(f"packing factor {factor:.2f}" in note for note in run.notes)
