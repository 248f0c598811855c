"""Whether tokenizer and model agree, and what is advised where they do not."""

import re
from pathlib import Path

import pytest

import windlass
from windlass.api import describe_job
from windlass.errors import PlanError

SETTINGS = (
    "train.steps=1", "train.batch=2", "train.sequence=16", "train.evaluate_sequences=2",
    "precision=float32", "compile=false",
)  # fmt: skip
GUIDE = Path(__file__).parents[4] / "docs" / "guide" / "your-own-model.md"
OWN = """
from torch import nn

def build(vocab_size=256):
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))
"""


@pytest.fixture
def words(home: Path) -> tuple[str, ...]:
    """A model file and settings for a short run on a small text."""
    (home / "own.py").write_text(OWN)
    return (f"{home / 'own.py'}:build", f"data.source={home / 'text'}", *SETTINGS)


def test_a_model_of_256_entries_trains_on_bytes(words: tuple[str, ...], home: Path) -> None:
    for own in ((), ("data.vocabulary=256",), ("data.tokenizer=byte",)):
        assert windlass.plan(*words, *own).request.data.vocabulary == 256
    assert len(list(windlass.train(*words, root=home / "runs"))) == 1


def test_a_trained_tokenizer_has_no_more_entries_than_its_model(words: tuple[str, ...]) -> None:
    assert windlass.plan(*words, "model.vocab_size=300").request.data.vocabulary == 300
    assert windlass.plan(*words, "model.vocab_size=9000").request.data.vocabulary == 4096
    tiny = windlass.plan("gpt-tiny", "model.vocabulary=500", *words[1:])
    assert tiny.request.data.vocabulary == 500


@pytest.mark.parametrize(
    ("own", "advice"),
    [
        ("data.vocabulary=300", "at least 300 entries, or set `data.vocabulary=256`"),
        ("data.vocabulary=257", "at least 257 entries, or set `data.vocabulary=256`"),
        ("model.vocab_size=100", "at least 256 entries; no tokenizer has fewer than 256"),
    ],
)
def test_a_plan_says_what_training_will_refuse_and_what_helps(
    words: tuple[str, ...], home: Path, own: str, advice: str
) -> None:
    planned = windlass.plan(*words, own)
    assert advice in dict(describe_job(planned))["tokenizer"]
    with pytest.raises(PlanError, match=re.escape(advice)):
        windlass.train(planned, root=home / "runs")
    followed = re.findall(r"`(data\.\w+=\d+)`", advice) or ["model.vocab_size=256"]
    assert "tokenizer" not in dict(describe_job(windlass.plan(*words, *followed)))


def test_a_tokenizer_file_of_more_entries_is_said_by_the_plan(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    from windlass.data.tokenizer import train_tokenizer

    train_tokenizer(["some words and some more words"] * 9, 270).save(tmp_path / "tokenizer.json")
    planned = windlass.plan(*words, f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    said = dict(describe_job(planned))["tokenizer"]
    assert "270 entries, and the model has only 256" in said
    assert "set `data.tokenizer=bpe` and `data.vocabulary=256`" in said


def test_the_first_model_and_command_of_the_guide_train_as_printed(home: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    code = re.search(r"```python\n(# my_model\.py.*?)```", text, re.DOTALL)
    command = re.search(r"\$ windlass train my_model\.py:build (.*)\n", text)
    assert code is not None
    assert command is not None
    (home / "my_model.py").write_text(code.group(1), encoding="utf-8")

    run = windlass.train(
        f"{home / 'my_model.py'}:build", *command.group(1).split(), *SETTINGS,
        f"data.source={home / 'text'}", root=home / "runs",
    )  # fmt: skip

    assert len(list(run)) == 1
    assert run.planned.graph.layers == 4
