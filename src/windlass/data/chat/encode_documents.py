"""Tokens of documents, the weight of each as a target, and the bytes that it stands for."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from windlass.data.chat.chat_template import ChatTemplate, Message
from windlass.data.chat.template_process import TemplateFault
from windlass.data.readers import TextDocument
from windlass.data.tokenizer import (
    TokenIds,
    Tokenizer,
    bytes_before_characters,
    encode_in_time,
)
from windlass.errors import DataError

TargetWeights = npt.NDArray[np.float32]
"""Weight of each token in the loss where it is a target, `Float[token]`; 0 does not count."""


class EncodedDocument(NamedTuple):
    """The tokens of a document."""

    ids: TokenIds
    """`Int[token]`; those of a text end with an end of text."""
    weights: TargetWeights | None = None
    """None learns all tokens, which are those of a text."""
    lengths: TokenIds | None = None
    """Bytes of a conversation that each token stands for, `Int[token]`; 0 for a special token."""


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[TextDocument]
) -> list[EncodedDocument]:
    """The tokens of documents, which are encoded on all cores.

    In a conversation, what spells a special token is that token, and a token is a target if any of
    its characters belongs to an answer, both as in transformers.
    """
    if documents and documents[0].targets is not None:
        return _conversations(tokenizer, documents)
    encoded = tokenizer.encode_batch([document.text for document in documents])
    before, behind = tokenizer.document_prefix, tokenizer.document_suffix
    return [
        EncodedDocument(np.concatenate([before, ids, behind]).astype(np.int64)) for ids in encoded
    ]


def encode_question(
    tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[Message]
) -> list[int]:
    """Ids of a conversation that ends with a user's message, up to where the answer begins.

    Raises:
        DataError: the template refuses it.
    """
    try:
        text = template.render(turns, generation_prompt=True).text
    except TemplateFault as fault:
        raise DataError(f"the chat template {template.name}: {fault}") from None
    backend = _with_special_tokens(tokenizer)
    return list(backend.encode(text, add_special_tokens=False).ids)


def _with_special_tokens(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer as it is saved, to which the spelling of a special token is that token."""
    return tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())


def _conversations(
    tokenizer: Tokenizer, documents: Sequence[TextDocument]
) -> list[EncodedDocument]:
    backend = _with_special_tokens(tokenizer)
    special = [i for i, t in backend.get_added_tokens_decoder().items() if t.special]
    encodings = encode_in_time(backend.encode_batch, [each.text for each in documents])
    encoded = [
        _encoded(document, encoding.ids, encoding.offsets, special)
        for document, encoding in zip(documents, encodings, strict=True)
    ]
    # A template says all that stands before a text; nothing does of a prompt and its completion.
    return [
        each if document.system is not None else _behind(tokenizer.document_prefix, each)
        for document, each in zip(documents, encoded, strict=True)
    ]


def _behind(prefix: tuple[int, ...], document: EncodedDocument) -> EncodedDocument:
    """A document behind tokens that are not learned."""
    added = [0] * len(prefix)
    return EncodedDocument(
        np.concatenate([prefix, document.ids]).astype(np.int64),
        np.concatenate([added, document.weights]).astype(np.float32),
        np.concatenate([added, document.lengths]).astype(np.int64),
    )


def _encoded(
    document: TextDocument, ids: list[int], offsets: list[tuple[int, int]], special: list[int]
) -> EncodedDocument:
    tokens = np.array(ids, dtype=np.int64)
    starts, ends = _extents(offsets, len(document.text))
    weights = np.zeros(len(tokens), dtype=np.float32)
    for span in document.targets or ():
        weights[(starts < span.end) & (ends > span.start)] = span.weight
    lengths = np.diff(bytes_before_characters(document.text)[ends], prepend=0)
    return EncodedDocument(tokens, weights, np.where(np.isin(tokens, special), 0, lengths))


def _extents(offsets: list[tuple[int, int]], length: int) -> tuple[TokenIds, TokenIds]:
    """First and last character (exclusive) of each token, with white space that offsets leave out.

    Several tokens may share one character.
    """
    pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(pairs[:, 1])
    ends[-1:] = length
    starts = np.minimum(pairs[:, 0], np.concatenate([[0], ends[:-1]]))
    return starts, ends
