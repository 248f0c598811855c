"""Tokenizer: text to ids and back; bytes, a trained byte-level BPE, or any `tokenizer.json`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from windlass.atomic_files import atomic_write
from windlass.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# What other families call the end of a text, most telling first.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
BYTE_VOCABULARY = 257

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Tokenizer:
    """Text to ids and back; `decode(encode(text)) == text` for bytes and trained ones."""

    backend: tokenizers.Tokenizer
    """Holds the vocabulary and merges."""
    bytewise: bool
    """Whether ids are the bytes of the text, so that `core` is needed for its file only."""
    vocabulary: int
    """Ids are below this."""
    end_of_text: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end of text; a literal `<|endoftext|>` is plain text."""
        if self.bytewise:
            return list(text.encode())
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; half a character is a replacement mark.

        An end of text is nothing, and so is an id that only the model knows, whose vocabulary may
        be larger.
        """
        if self.bytewise:
            return bytes(i for i in ids if i < self.end_of_text).decode(errors="replace")
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of `ids` as it comes, held back where a character is not yet whole."""
        held: list[int] = []
        for token in ids:
            held.append(token)
            text = self.decode(held)
            if not text.endswith("\ufffd"):
                yield text
                held.clear()
        if held:
            yield self.decode(held)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, on all cores."""
        if self.bytewise:
            return [np.frombuffer(t.encode(), dtype=np.uint8).astype(np.int64) for t in texts]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def bytes_per_id(self) -> TokenIds | None:
        """Bytes of text each id stands for; None if an id has no fixed number of them."""
        if self.bytewise:
            return np.array([1] * 256 + [0], dtype=np.int64)
        form = json.loads(self.backend.to_str())
        if form["normalizer"] is not None or (form["decoder"] or {}).get("type") != "ByteLevel":
            return None
        lengths = np.zeros(self.vocabulary, dtype=np.int64)
        for token, index in self.backend.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)  # one letter of the byte alphabet is one byte
        for index, added in self.backend.get_added_tokens_decoder().items():
            lengths[index] = 0 if added.special else len(added.content.encode())
        return lengths

    def bytes_per_token(self, text: str) -> TokenIds:
        """Bytes of text each token of `text` takes, by its place; the sum is that of the text.

        Of several tokens inside one character the first takes it whole.
        """
        places = self.backend.encode(text, add_special_tokens=False).offsets
        if not places:
            return np.zeros(0, dtype=np.int64)
        letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        width = 1 + (letters >= 0x80) + (letters >= 0x800) + (letters >= 0x10000)
        upto = np.concatenate([[0], np.cumsum(width)])
        ends = np.maximum.accumulate(np.array([end for _, end in places], dtype=np.int64))
        ends[-1] = len(letters)
        return np.diff(upto[ends], prepend=0)

    def save(self, path: Path) -> None:
        """Writes a `tokenizer.json`, whole or not at all.

        Raises:
            StorageError: the disk is full or closed.
        """
        atomic_write(path, self.backend.to_str(pretty=True))


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of the text in UTF-8, 256 is the end of a text."""
    core = _byte_level(models.BPE(vocab=_byte_letters(), merges=[]))
    core.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend=core, bytewise=True, vocabulary=BYTE_VOCABULARY, end_of_text=256)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of these texts; the same texts in any run give the same one.

    Args:
        texts: streamed once.
        vocabulary: entries asked for; a text with few distinct words gives fewer.
    """
    core = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(texts, trainer)
    return _wrapped(core)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`: one that was saved, or anyone's.

    One that knows no end of a text is given an id for it.

    Raises:
        DataError: no such file, or it is no tokenizer.
    """
    try:
        core = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"no tokenizer file `{path}`: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is no `tokenizer.json`: not UTF-8") from None
    except Exception as error:  # noqa: BLE001  tokenizers raises bare `Exception`
        raise DataError(f"`{path}` is no `tokenizer.json`: {error}") from None
    core.no_padding()
    core.no_truncation()
    if _is_bytes(core):
        return byte_tokenizer()
    return _wrapped(core)


def _is_bytes(core: tokenizers.Tokenizer) -> bool:
    known = _byte_letters() | {END_OF_TEXT: 256}
    return core.get_vocab_size() == BYTE_VOCABULARY and core.get_vocab() == known


def _wrapped(core: tokenizers.Tokenizer) -> Tokenizer:
    # Text that happens to spell a special token must not become one.
    core.encode_special_tokens = True
    known = core.get_vocab()
    end = next((known[name] for name in _ENDS if name in known), None)
    if end is None:
        core.add_special_tokens([END_OF_TEXT])
        known = core.get_vocab()
        end = known[END_OF_TEXT]
    # Ids may have gaps, so the largest decides.
    vocabulary = max(known.values()) + 1
    return Tokenizer(backend=core, bytewise=False, vocabulary=vocabulary, end_of_text=end)


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary.

    Source: GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the others take the
    letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others: Iterator[int] = iter(range(0x100, 0x200))
    return {chr(b if b in printable else next(others)): b for b in range(256)}
