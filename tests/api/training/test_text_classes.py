"""BERT on sentence pairs and on texts with classes: training, resuming, taking home."""

import json
import random
from pathlib import Path

import pytest

import windlass
from windlass.errors import DataError, ModelError

SMALL = (
    "bert-tiny", "model.layers=2", "model.width=64", "model.heads=2", "model.vocabulary=300",
    "data.tokenizer=byte", "train.sequence=48", "train.batch=16", "compile=false",
    "precision=float32",
)  # fmt: skip


@pytest.fixture
def films(home: Path) -> Path:
    """Lines whose class one of three words tells."""
    draw, path = random.Random(0), home / "films.jsonl"
    words = {"good": "great", "bad": "awful", "mixed": "so-so"}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(240):
            label = draw.choice(sorted(words))
            text = f"the film was {words[label]} in {draw.randint(1950, 2026)}"
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    return path


@pytest.mark.slow
def test_classes_are_learned_and_taken_home_with_their_names(home: Path, films: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    words = (*SMALL, "model.classes=3", "data.format=classes", f"data.source={films}")
    run = windlass.train(
        *words, "train.steps=80", "train.learning_rate=2e-3", root=home / "runs"
    )  # fmt: skip
    list(run)

    last = windlass.load(run.folder).steps[-1]
    assert last.held_out_accuracy is not None
    assert last.held_out_accuracy > 0.9  # a guess has a third
    windlass.export(run.folder, to=f"hf:{home / 'classifier'}")
    model = AutoModelForSequenceClassification.from_pretrained(home / "classifier")
    assert model.config.id2label == {0: "bad", 1: "good", 2: "mixed"}
    # The folder keeps its classes and needs no dial; its trained head takes adapters.
    again = windlass.train(
        f"hf:{home / 'classifier'}", "data.format=classes", f"data.source={films}",
        "data.tokenizer=byte", "train.sequence=48", "train.batch=16", "train.steps=1",
        "compile=false", "precision=float32", "lora.rank=2", root=home / "runs",
    )  # fmt: skip
    list(again)
    assert windlass.load(again.folder).steps[-1].held_out_accuracy == last.held_out_accuracy


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        ("parallel.tensor=2", "parallel.pipeline=2", "batch.micro=2"),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2", "batch.micro=2"),
        ("phases=3", "batch.micro=4"),
    ],
)
def test_both_tasks_are_the_same_however_they_are_divided(
    home: Path, films: Path, pins: tuple[str, ...]
) -> None:
    pairs = (
        *SMALL,
        "model.sentence_head=true",
        "data.packing=true",
        f"data.source={home / 'text'}",
    )
    classes = (*SMALL, "model.classes=3", "data.format=classes", f"data.source={films}")
    for words in (pairs, classes):
        assert windlass.check(*words, *pins)


@pytest.mark.slow
def test_a_sentence_head_learns_what_follows_where_words_tell(home: Path) -> None:
    draw, path = random.Random(0), home / "texts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for index in range(300):
            letters = [chr(97 + index % 13 * 2), chr(98 + index % 13 * 2)]
            file.write(json.dumps({"text": "".join(draw.choices(letters, k=90))}) + "\n")
    run = windlass.train(
        *SMALL, "model.sentence_head=true", f"data.source={path}", "train.steps=300",
        "train.learning_rate=2e-3", root=home / "runs",
    )  # fmt: skip
    list(run)
    last = windlass.load(run.folder).steps[-1]
    assert last.held_out_accuracy is not None
    assert last.held_out_accuracy > 0.8  # a guess has a half
    assert last.held_out_sentence_loss is not None
    assert last.held_out_loss is not None
    assert last.held_out_loss > last.held_out_sentence_loss


def test_what_has_no_class_is_refused(home: Path, films: Path) -> None:
    data = ("data.format=classes", f"data.source={films}")
    with pytest.raises(DataError, match=r"says no class of a text; set `model\.classes`"):
        windlass.train(*SMALL, *data, folder=home / "run")
    with pytest.raises(ModelError, match="`sentence_head` is of masked tokens, not of `classes`"):
        windlass.plan(*SMALL, *data, "model.classes=3", "model.sentence_head=true")
