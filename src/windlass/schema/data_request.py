"""DataRequest: the data to train on, and how they are read; DataSize: how much they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from windlass.schema.model_request import Name, RequestTable, Size
from windlass.units import Bytes

Deviation = Annotated[float, Field(gt=0)]
"""A standard deviation."""

_HELD_OUT = 0.05
BYTE_ENTRIES = 256
"""Entries of the smallest tokenizer: bytes, of which 0, that no text has, is the end of a text."""
_MAX_ENTRIES = 2**20
"""Largest vocabulary that a tokenizer is trained for."""

SENTENCES_PER_ROW = 3
"""Most pairs of sentences that share a row. Source: Krell et al. 2021, arXiv:2107.02027, whose
packs of three fill nearly as much as larger ones."""

DataFormat = Literal["text", "chat", "images", "classes"]
"""What a source holds: text that is learned whole, conversations, or images or texts with a class
each."""
LongDocuments = Literal["truncate", "drop"]
"""What becomes of a conversation that is longer than a sequence."""


class DataRequest(RequestTable):
    """The text to train on and how it is tokenized, or the images."""

    source: Name | tuple[Name, ...] = "stdlib"
    """`stdlib` (the Python standard library's sources on this machine), a folder, a `.txt`,
    `.jsonl` or `.parquet` file, a Hugging Face data set (`hf:name`, or a saved folder), or a list
    of these."""
    weights: tuple[float, ...] | None = None
    """Share of the training sequences that is taken from each source, in the order of `source`,
    relative to each other; None takes them in proportion to their tokens."""
    validation: Name | None = None
    """Text to evaluate on, named like a `source`; all of `source` is trained on then. None holds
    out a part of `source`."""
    format: DataFormat = "text"
    """`text`, or `chat`: tables with `messages`, or with `prompt` and `completion`, of which the
    answers are learned, or `images`: a folder with a folder for each class, tables with a column of
    images, or `digits`, or `classes`: tables of texts, or of pairs of texts, with a class each."""
    image_field: Name = "image"
    """The column of a table that holds images."""
    label_field: Name = "label"
    """The column of a table that holds the class of each image or text."""
    image_shape: tuple[Size, Size, Size] | None = None
    """Channels, height and width that images are scaled and cut to; None means what the model
    takes."""
    image_mean: tuple[float, ...] | None = None
    """Mean of each channel that is subtracted, of pixels up to 1; None means that of the training
    images, or of a Hugging Face model's own."""
    image_std: tuple[Deviation, ...] | None = None
    """What each channel is divided by afterwards; None means likewise."""
    flips: bool = False
    """Whether half of the training images are mirrored."""
    border: int = Field(default=0, ge=0, le=256)
    """Most pixels by which a training image is moved, over a border of zeros."""
    text_field: Name = "text"
    """The field of a table that holds the text."""
    second_field: Name | None = None
    """The field of a table that holds the second text of a pair that has a class; None means that
    one text alone has one."""
    chat_template: Name | None = None
    """How conversations become text: `plain`, `chatml`, or the path of a Jinja file. None takes the
    template beside the `tokenizer.json`, or one of these two where there is none."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Further variables of the template, such as `enable_thinking`; a row's own
    `chat_template_kwargs` go before them."""
    chat_date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Day that a template tells which asks for it, such as `2025-12-31`; None takes that of the
    first plan."""
    long_documents: LongDocuments = "truncate"
    """What becomes of a conversation that is longer than a sequence: its end is cut off
    (`truncate`), or it is left out (`drop`)."""
    packing: bool = False
    """Whether conversations, or the documents of a text whose masked tokens are learned, share
    sequences, in which none sees another and the positions of each begin at 0."""
    tokenizer: Name = "bpe"
    """`byte`, `bpe` (trained on this corpus), or the path of a `tokenizer.json`."""
    vocabulary: int = Field(default=4096, ge=BYTE_ENTRIES, le=_MAX_ENTRIES)
    """Entries of a trained tokenizer, by default no more than the model has; 256 are the bytes, of
    which 0 is the end of a text."""
    held_out: float = Field(default=_HELD_OUT, gt=0, lt=1)
    """Share of documents that is kept for evaluation and never trained on, without
    `validation`."""
    limit_bytes: Bytes | None = None
    """Most text to take from each source, in its order, such as `100MB`; None takes all."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources to train on, also if there is one."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def _misplaced_keys(self) -> Iterator[str]:
        """Keys that say nothing of such data, a sentence for each kind of data that they belong to.

        The request in a run folder states defaults, too.
        """
        for formats, keys, what in _KEYS_OF_FORMATS:
            fields = type(self).model_fields
            given = [f"`{key}`" for key in keys if getattr(self, key) != fields[key].default]
            if self.format not in formats and given:
                yield (
                    f"{' and '.join(given)} of {self.format}, which {_HAS[self.format]} no {what}; "
                    f"set `format` to `{formats[-1]}`"
                )

    @model_validator(mode="after")
    def _sources_and_weights_agree(self) -> Self:
        sources, weights = self.sources, self.weights
        if not sources or len(set(sources)) < len(sources):
            raise ValueError(
                f"`source` = {list(sources)}: name at least one source, and each of them once"
            )
        if weights is not None and len(weights) != len(sources):
            raise ValueError(
                f"{len(weights)} `weights` for {len(sources)} sources; give each source one weight"
            )
        if weights is not None and not all(isfinite(w) and w > 0 for w in weights):
            raise ValueError(
                f"`weights` = {list(weights)}: each should be a positive number; leave a source "
                "out of `source` to give it no weight"
            )
        if misplaced := tuple(self._misplaced_keys()):
            raise ValueError("; ".join(misplaced))
        if self.validation is not None and self.held_out != _HELD_OUT:
            raise ValueError(
                f"`held_out` = {self.held_out:g} with `validation` = {self.validation!r}, which "
                "holds out nothing of `source`; leave one of them out"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """How much there is to train on."""

    tokens: int | None = None
    """Tokens to train on; None if they are images, or not counted."""
    rows: int | None = None
    """Conversations or examples to train on, each of which is a row; None is text, which fills rows
    of any length."""
    sequence: int | None = None
    """Tokens of a row that hold the longest conversation, or the most that a text has enough of;
    None sets no limit."""
    by_epochs: bool = True
    """Whether steps and batch follow from these data, as in fine-tuning; otherwise the sequence
    alone does."""
    is_named: bool = True
    """Whether the request names them; otherwise they are the ones that every machine has."""
    is_estimate: bool = False
    """Whether tokens are estimated from the size of the files."""


_HAS: dict[DataFormat, str] = {"text": "has", "chat": "has", "images": "have", "classes": "have"}
_KEYS_OF_FORMATS: tuple[tuple[tuple[DataFormat, ...], tuple[str, ...], str], ...] = (
    (
        ("chat",),
        ("chat_template", "chat_template_kwargs", "chat_date", "long_documents"),
        "conversations",
    ),
    (("text", "chat"), ("packing",), "documents to pack"),
    (
        ("images",),
        ("image_field", "image_shape", "image_mean", "image_std", "flips", "border"),
        "images",
    ),
    (("images", "classes"), ("label_field",), "classes"),
    (("classes",), ("second_field",), "pairs of texts"),
    (("chat", "text"), ("weights",), "tokens to count"),
    (("chat", "classes", "text"), ("limit_bytes",), "tokens to count"),
)
"""Formats, keys that only they have, and what these keys are about."""
