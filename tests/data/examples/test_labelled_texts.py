"""Texts with classes: how rows become examples, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from windlass.data.examples import ExampleDataset, load_examples
from windlass.data.examples.labelled_texts import labelled_fingerprint, prepare_labelled_texts
from windlass.errors import DataError, InputErrors
from windlass.schema import DataRequest

VOCABULARY = 300
FIRST, END = VOCABULARY - 2, 256
"""The tokens before and behind a text; the tokenizer is that of bytes."""

Write = Callable[..., DataRequest]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows as JSON lines."""

    def make(rows: list[dict[str, object]], **settings: object) -> DataRequest:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        known = {"format": "classes", "tokenizer": "byte", "held_out": 0.5}
        return DataRequest(source=str(path), **(known | settings))

    return make


def prepared(data: DataRequest, **settings: object) -> ExampleDataset:
    known = {"sequence": 10, "vocabulary": VOCABULARY, "classes": None}
    return prepare_labelled_texts(data, **(known | settings))


def rows_of(examples: ExampleDataset) -> dict[str, list[int]]:
    """What is no fill of each example, by the name of its class."""
    assert examples.documents is not None
    assert examples.classes is not None
    return {
        examples.classes[target]: row[documents == 0].tolist()
        for row, documents, target in zip(
            examples.inputs, examples.documents, examples.targets, strict=True
        )
    }


def test_a_text_stands_between_special_tokens_and_its_fill_is_apart(write: Write) -> None:
    examples = prepared(write([{"text": "ab", "label": "x"}, {"text": "cde", "label": "y"}]))
    assert rows_of(examples) == {"x": [FIRST, 97, 98, END], "y": [FIRST, 99, 100, 101, END]}
    assert examples.inputs.shape == (2, 10)
    assert examples.held_out == 1


def test_the_second_text_is_of_the_second_segment_and_the_longer_one_loses_its_end(
    write: Write,
) -> None:
    rows = [
        {"one": "abcdefgh", "two": "xy", "label": 10},
        {"one": "a", "two": "uvwxyzuvw", "label": 9},
    ]
    data = write(rows, text_field="one", second_field="two")
    second = [VOCABULARY + code for code in b"xy"]
    longer = [VOCABULARY + code for code in b"uvwxyz"]
    assert rows_of(prepared(data)) == {
        "10": [FIRST, *b"abcde", END, *second, VOCABULARY + END],
        "9": [FIRST, *b"a", END, *longer, VOCABULARY + END],
    }
    # Numbers are in the order of numbers, and a model's own names in its order.
    assert prepared(data).classes == ("9", "10")
    assert prepared(data, classes=("10", "8", "9")).classes == ("10", "8", "9")


def test_what_is_held_out_does_not_depend_on_the_order_of_rows(write: Write) -> None:
    rows = [{"text": f"text {n}", "label": n % 3} for n in range(30)]
    sides = []
    for order in (rows, rows[::-1]):
        examples = prepared(write(order, held_out=0.2))
        sides.append({row.tobytes() for row in examples.inputs[-examples.held_out :]})
        assert examples.held_out == 6
    assert sides[0] == sides[1]


def test_names_of_classes_are_kept_in_a_file(write: Write, tmp_path: Path) -> None:
    examples = prepared(write([{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}]))
    examples.save(tmp_path / "kept")
    kept = load_examples(tmp_path / "kept")
    assert kept is not None
    assert kept.classes == ("no", "yes")
    assert np.array_equal(kept.documents, examples.documents)
    assert kept.fingerprint == examples.fingerprint


def test_the_fingerprint_is_that_of_the_rows(write: Write) -> None:
    rows = [{"text": "a", "label": "no", "other": n} for n in range(2)]
    first = labelled_fingerprint(write(rows))
    assert labelled_fingerprint(write([row | {"other": 9} for row in rows])) == first
    assert labelled_fingerprint(write([row | {"label": "yes"} for row in rows])) != first


def test_every_row_that_is_wrong_is_named_at_once(write: Write) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": 3, "label": "x"}, {"text": "b", "label": 0.5}]
    with pytest.raises(InputErrors) as caught:
        prepared(write(rows))
    assert ":2: a text is no text but [3]" in str(caught.value)
    assert ":3: `label` is 0.5; a class is a word or a number" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "classes", "message"),
    [
        ([{"text": "a", "class": "x"}], None, r"no field `label`.*`data\.label_field`"),
        ([{"text": "a", "label": "x"}] * 2, None, "all texts are of class `x`"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], ("x", "z"), "class `y` of"),
    ],
)
def test_data_without_such_classes_are_refused(
    write: Write, rows: list[dict[str, object]], classes: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises((DataError, InputErrors), match=message):
        prepared(write(rows), classes=classes)


def test_rows_without_room_for_a_text_are_refused(write: Write) -> None:
    rows = [{"text": "a", "other": "b", "label": label} for label in ("x", "y")]
    with pytest.raises(DataError, match="no token for a text beside the 3 tokens"):
        prepared(write(rows, second_field="other"), sequence=3)
