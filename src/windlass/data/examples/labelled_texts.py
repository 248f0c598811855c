"""Texts, or pairs of texts, with a class each: rows of tables as examples of one length."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windlass.data.examples.example_dataset import ExampleDataset
from windlass.data.packing.sentence_pairs import PairTokens
from windlass.data.readers import Row, TextDocument, UnreadableDocument, documents_of_rows
from windlass.data.sources import find_corpus
from windlass.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from windlass.errors import DataError, raise_data_errors
from windlass.schema import DataRequest

_MOST_ERRORS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRows:
    """Each row of a table has a text, maybe a second one, and a class."""

    text: str
    second: str | None
    label: str
    reads_text: bool = False

    def columns(self, names: Sequence[str]) -> tuple[str, ...] | str:
        """The columns with texts and class, or that one is missing."""
        wanted = {"text_field": self.text, "second_field": self.second, "label_field": self.label}
        for key, field in wanted.items():
            if field is not None and field not in names:
                fields = ", ".join(f"`{name}`" for name in names) or "none"
                return f"no field `{field}`; fields are {fields}; name yours as `data.{key}`"
        return tuple(field for field in wanted.values() if field is not None)

    def documents(
        self, items: Iterable[Row | TextDocument | UnreadableDocument]
    ) -> Iterator[TextDocument | UnreadableDocument]:
        """Each row as JSON of its class and texts."""
        return documents_of_rows(items, self._document)

    def _document(self, row: Row) -> TextDocument | UnreadableDocument:
        texts = [row.values[field] for field in (self.text, self.second) if field is not None]
        label = row.values[self.label]
        if not all(isinstance(text, str) for text in texts):
            return UnreadableDocument(message=f"{row.where}: a text is no text but {texts!r:.60}")
        if isinstance(label, bool) or not isinstance(label, str | int):
            return UnreadableDocument(
                message=f"{row.where}: `{self.label}` is {label!r:.40}; a class is a word or a "
                "number"
            )
        content = json.dumps([str(label), *texts])
        return TextDocument(name=row.name, text=content, nbytes=len(content))


def prepare_labelled_texts(
    data: DataRequest, *, sequence: int, vocabulary: int, classes: Sequence[str] | None
) -> ExampleDataset:
    """The examples of a request: `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, filled up.

    A text that is too long loses its end; of a pair the longer one does, first.

    Args:
        sequence: tokens of an example.
        vocabulary: entries of the model; ids of a second text are higher by that.
        classes: names of the model's classes in order; None orders those of the data by name, or by
            number if all are numbers.

    Raises:
        DataError: there are no rows, only one class, or no room for a text.
        InputErrors: all rows that cannot be read, or whose class is none of `classes`.
    """
    marks = 2 if data.second_field is None else 3
    if sequence <= marks:
        raise DataError(
            f"`train.sequence` = {sequence} leaves no token for a text beside the {marks} tokens "
            "that stand around it; raise it"
        )
    rows = [list(_rows(source, data)) for source in data.sources]
    training = [row for part in rows for row in part]
    validation = [] if data.validation is None else list(_rows(data.validation, data))
    if data.validation is None:
        training, validation = _split(training, data.held_out)
    every = [*training, *validation]
    names = _class_names({row[0] for row in every}, classes)
    tokenizer = _tokenizer(data, [text for row in training for text in row[1:]])
    special = PairTokens(
        first=vocabulary - 2 if tokenizer.class_token is None else tokenizer.class_token,
        separator=tokenizer.end_of_text,
        second_offset=vocabulary,
    )
    inputs = np.full((len(every), sequence), tokenizer.end_of_text, dtype=np.int64)
    documents = np.ones_like(inputs)
    for index, (_, *texts) in enumerate(every):
        ids = _encoded(tokenizer, texts, sequence, special)
        inputs[index, : len(ids)], documents[index, : len(ids)] = ids, 0
    number = {name: index for index, name in enumerate(names)}
    targets = np.array([number[row[0]] for row in every], dtype=np.int64)
    return ExampleDataset(
        inputs=inputs, targets=targets, held_out=len(validation), documents=documents,
        classes=names, tokenizer=tokenizer,
    )  # fmt: skip


def labelled_fingerprint(data: DataRequest) -> str:
    """A hash of all rows that a request names."""
    sources = (*data.sources, *(() if data.validation is None else (data.validation,)))
    content = json.dumps([list(_rows(source, data)) for source in sources])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _rows(source: str, data: DataRequest) -> Iterator[list[str]]:
    """Class and texts of each row."""
    fields = LabelledRows(
        text=data.text_field, second=data.second_field, label=data.label_field
    )  # fmt: skip
    corpus = find_corpus(source).tables(fields)
    items = list(corpus.documents(rows=fields, limit_bytes=data.limit_bytes))
    errors = [item.message for item in items if isinstance(item, UnreadableDocument)]
    raise_data_errors(errors[:_MOST_ERRORS])
    if not items:
        raise DataError(
            f"no texts with classes in `{source}`; name a table, such as JSON lines with "
            f"`{data.text_field}` and `{data.label_field}`"
        )
    yield from (json.loads(item.text) for item in items if isinstance(item, TextDocument))


def _split(
    rows: list[list[str]], share: float
) -> tuple[list[list[str]], list[list[str]]]:  # fmt: skip
    """Rows to train on, and those whose texts have the lowest hashes, which are held out."""
    if len(rows) < 2:
        raise DataError(f"{len(rows)} text is too few: one to train on and one to hold out")
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    order = sorted(
        range(len(rows)), key=lambda i: hashlib.blake2b(json.dumps(rows[i]).encode()).digest()
    )
    held_out = sorted(order[:count])
    chosen = set(held_out)
    return [row for i, row in enumerate(rows) if i not in chosen], [rows[i] for i in held_out]


def _class_names(found: set[str], known: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in order."""
    if known is not None and (unknown := sorted(found - set(known))):
        raise_data_errors(
            [
                f"class `{name}` of the data is none of the model's, "
                f"{', '.join(f'`{each}`' for each in known[:10])}"
                for name in unknown
            ]
        )
    if known is not None:
        return tuple(known)
    if len(found) < 2:
        raise DataError(f"all texts are of class `{next(iter(found))}`, and a class needs another")
    is_number = all(name.isdecimal() for name in found)
    return tuple(sorted(found, key=int if is_number else str))


def _tokenizer(data: DataRequest, texts: Sequence[str]) -> Tokenizer:
    if data.tokenizer == "byte":
        return byte_tokenizer(data.vocabulary)
    if data.tokenizer == "bpe":
        return train_tokenizer(texts, data.vocabulary)
    return load_tokenizer(Path(data.tokenizer).expanduser())


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], sequence: int, special: PairTokens
) -> list[int]:
    """Ids of one text, or of a pair."""
    parts = [tokenizer.encode(text) for text in texts]
    while sum(map(len, parts)) + len(parts) + 1 > sequence:
        max(parts, key=len).pop()
    ids = [special.first]
    for part, added in zip(parts, (0, special.second_offset), strict=False):
        ids += [token + added for token in (*part, special.separator)]
    return ids
