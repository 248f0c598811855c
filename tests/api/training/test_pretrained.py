"""Runs that start from the weights of a Hugging Face folder."""

from pathlib import Path

import pytest

import windlass
from factories import tiny_machine
from hub_folders import gpt2_folder
from windlass.errors import DataError, ModelError, PlanError
from windlass.hardware.local_machine import save_local_machine, system_fingerprint

STEPS = (
    "train.batch=2", "train.sequence=16", "train.steps=3", "train.evaluate_sequences=2",
    "compile=false", "precision=float32",
)  # fmt: skip


def losses(home: Path, model: str, *overrides: str) -> list[float]:
    words = (*STEPS, f"data.source={home / 'text'}", *overrides)
    return [step.loss for step in windlass.train(model, *words, root=home / "runs")]


def test_a_streamed_run_begins_with_the_same_weights_as_a_whole_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    model = gpt2_folder(home / "gpt2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    machine = tiny_machine(memory="8 GiB", host="8 GiB")
    system = {"name": "here", "system": system_fingerprint()}
    save_local_machine(home / "cache" / "windlass", machine.model_copy(update=system))

    whole, streamed = losses(home, model, "phases=1"), losses(home, model, "phases=2")

    # The same products in float32, in another order.
    assert streamed == pytest.approx(whole, rel=1e-5)
    # Weights of width 1 are far from those that a seed draws.
    assert whole[0] > 10 > losses(home, f"{model}/config.json", "data.tokenizer=byte")[0]


def test_a_run_takes_the_tokenizer_of_its_model(home: Path):
    planned = windlass.plan(gpt2_folder(home / "gpt2"))

    assert planned.request.data.tokenizer == str(home / "gpt2" / "tokenizer.json")


def test_weights_are_not_trained_on_tokens_of_another_tokenizer(home: Path):
    model = gpt2_folder(home / "gpt2")
    (home / "gpt2" / "tokenizer.json").unlink()

    with pytest.raises(DataError, match=r"has no `tokenizer.json`"):
        losses(home, model)


def test_a_tokenizer_of_another_size_is_refused(home: Path):
    with pytest.raises(PlanError, match="name the tokenizer that belongs to the model"):
        losses(home, gpt2_folder(home / "gpt2", vocabulary=200))


def test_a_folder_without_weights_is_planned_and_not_trained(home: Path):
    model = gpt2_folder(home / "gpt2")
    (home / "gpt2" / "model.safetensors").unlink()

    assert windlass.plan(model).graph.vocabulary == 260
    with pytest.raises(ModelError, match=r"has no weights.*config.json"):
        losses(home, model)
    assert not list((home / "runs").glob("*"))
