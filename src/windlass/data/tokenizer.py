"""Tokenizers: UTF-8 bytes, a trained byte-level BPE, or any `tokenizer.json`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from windlass.atomic_files import atomic_write, read_regular_file
from windlass.data.tokenizer_folder import (
    TOKENIZER_CONFIG_FILE,
    add_named_tokens,
    ids_around_text,
    special_ids,
    special_tokens,
)
from windlass.errors import DataError, shorten
from windlass.schema import BYTE_ENTRIES, SPECIAL_TOKENS_FILE
from windlass.units import format_seconds

END_OF_TEXT = "<|endoftext|>"
"""The end of a text in tokenizers of ours, and in others that are said to have none."""
_MOST_IDS = 2**24
"""Ids that are counted at most: 60 times those of the largest published tokenizer."""

_MOST_SECONDS, _FEWEST_CHARACTERS = 60.0, 10_000
"""Time that encoding may take, and characters for each second more: a hundredth of what a core
encodes."""

_WINDOW_TOKENS = 128
"""Tokens that are decoded together at most while a text arrives."""

TokenIds = npt.NDArray[np.int64]
"""Token ids `Int[token]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Tokenizer:
    """Maps text to ids and back; bytes and trained ones satisfy `decode(encode(text)) == text`."""

    backend: tokenizers.Tokenizer
    """The `tokenizers` object with vocabulary and merges."""
    bytewise: bool
    """Whether ids are the bytes of the text, so that `backend` is only needed to save the file."""
    vocabulary: int
    """Upper limit of ids, exclusive."""
    end_of_text: int
    """Id of the end of a text."""
    mask_token: int | None = None
    """Id that hides a token from an encoder; None if the tokenizer has none."""
    class_token: int | None = None
    """Id before a text, whose vector says what class it has; None if the tokenizer has none."""
    bos_token: int | None = None
    """Id of the beginning of a text; None if the tokenizer names none."""
    prefix: tuple[int, ...] = ()
    """Ids that the tokenizer itself puts before a text."""
    suffix: tuple[int, ...] = ()
    """Ids that the tokenizer itself puts behind a text."""
    special: Mapping[str, str] = field(default_factory=dict)
    """Its special tokens by the names that transformers has, such as `eos_token`."""

    @property
    def document_prefix(self) -> tuple[int, ...]:
        """Ids before each document: an encoder's stand before a row of them."""
        return () if self.mask_token is not None else self.prefix

    @property
    def document_suffix(self) -> tuple[int, ...]:
        """Ids behind each document, of which the last is the end of a text."""
        end = (self.end_of_text,)
        return (
            end
            if self.mask_token is not None or not self.suffix
            else (self.suffix if self.suffix[-1:] == end else self.suffix + end)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without those around it; a literal `<|endoftext|>` is plain text."""
        if self.bytewise:
            return list(text.encode())
        return list(encode_in_time(self.backend.encode_batch, [text])[0].ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that goes on, behind those that the tokenizer puts before a text.

        An empty text is what stands before any: those ids, or a beginning or an end of a text.
        """
        ids = [*self.prefix, *self.encode(text)]
        return ids or [self.end_of_text if self.bos_token is None else self.bos_token]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; an incomplete character becomes a replacement character.

        An end of text becomes nothing, and so does an id beyond the tokenizer's, which a model
        with a larger vocabulary may produce.
        """
        if self.bytewise:
            end = self.end_of_text
            return bytes(i for i in ids if i < BYTE_ENTRIES and i != end).decode(errors="replace")
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream_decode(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
        """Text of `ids` as they arrive, delayed while a character is incomplete.

        The pieces joined are `decode(ids)`; behind a prompt, what `ids` add to its text.

        Args:
            prompt: those whose text goes on with them, with the space between two words.
        """
        window = list(prompt)
        shown = self.decode(window).rstrip("\ufffd") if window else ""
        for token in ids:
            window.append(token)
            text = self.decode(window)
            # What a decoder changes behind itself waits, as half a character does.
            if text.endswith("\ufffd") or not text.startswith(shown):
                continue
            if text != shown:
                yield text[len(shown) :]
            if len(window) > _WINDOW_TOKENS:
                window = window[-_WINDOW_TOKENS // 2 :]
                text = self.decode(window)
            shown = text
        text = self.decode(window)
        same = next(
            (n for n, pair in enumerate(zip(text, shown, strict=False)) if len({*pair}) > 1),
            len(shown),
        )
        rest = text[same:]
        if rest:
            yield rest

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of several texts, encoded on all cores."""
        if self.bytewise:
            return [np.frombuffer(t.encode(), dtype=np.uint8).astype(np.int64) for t in texts]
        encodings = encode_in_time(self.backend.encode_batch_fast, texts)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def bytes_per_id(self) -> TokenIds | None:
        """Bytes of text that each id stands for, `Int[id]`; None if they vary with the text."""
        if self.bytewise:
            lengths = np.ones(self.vocabulary, dtype=np.int64)
            lengths[self.end_of_text] = 0
            return lengths
        spec = json.loads(self.backend.to_str())
        if spec["normalizer"] is not None or (spec["decoder"] or {}).get("type") != "ByteLevel":
            return None
        lengths = np.zeros(self.vocabulary, dtype=np.int64)
        for token, index in self.backend.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)  # one letter of the byte alphabet is one byte
        for index, added in self.backend.get_added_tokens_decoder().items():
            lengths[index] = 0 if added.special else len(added.content.encode())
        return lengths

    def bytes_per_token(self, text: str) -> TokenIds:
        """Bytes of `text` that each of its tokens stands for, `Int[token]`; they sum to the text.

        If several tokens share one character, the first counts all of its bytes.
        """
        offsets = self.backend.encode(text, add_special_tokens=False).offsets
        if not offsets:
            return np.zeros(0, dtype=np.int64)
        ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
        ends[-1] = len(text)
        return np.diff(bytes_before_characters(text)[ends], prepend=0)

    def save(self, path: Path) -> tuple[str, ...]:
        """Writes a `tokenizer.json` and, beside it, which of its tokens are special.

        Returns:
            The names of the files.
        """
        atomic_write(path, self.backend.to_str(pretty=True))
        if not self.special:
            return (path.name,)
        special = json.dumps(dict(self.special), indent=2, sort_keys=True)
        atomic_write(path.with_name(SPECIAL_TOKENS_FILE), f"{special}\n")
        return (path.name, SPECIAL_TOKENS_FILE)


def encode_in_time(
    encode: Callable[..., list[tokenizers.Encoding]],
    texts: Sequence[str],
    *,
    seconds: float = _MOST_SECONDS,
) -> list[tokenizers.Encoding]:
    """The encodings of texts, in a time that a tokenizer from anywhere cannot stretch.

    Its regular expressions may take for ever, and their library hears no Ctrl-C: a thread waits for
    them, which ends with this process.

    Args:
        encode: `encode_batch` of a tokenizer.
        seconds: time that it may take for no text at all.

    Raises:
        DataError: it takes too long, or its regular expression gives up.
    """
    results: Queue[list[tokenizers.Encoding] | BaseException] = Queue()

    def run() -> None:
        try:
            results.put(encode(list(texts), add_special_tokens=False))
        except BaseException as error:  # noqa: BLE001  a panic of the library is no `Exception`
            results.put(error)

    Thread(target=run, daemon=True).start()
    most = seconds + sum(map(len, texts)) / _FEWEST_CHARACTERS
    try:
        result = results.get(timeout=most)
    except Empty:
        raise DataError(
            f"the tokenizer takes more than {format_seconds(most)} for {len(texts)} texts; "
            "name another one as `data.tokenizer`"
        ) from None
    if isinstance(result, BaseException):
        raise DataError(
            f"the tokenizer cannot encode a text: {result}; name another one as `data.tokenizer`"
        ) from None
    return result


def bytes_before_characters(text: str) -> TokenIds:
    """Bytes in UTF-8 before each character, and of the whole text, `Int[character + 1]`."""
    characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    width = 1 + (characters >= 0x80) + (characters >= 0x800) + (characters >= 0x10000)
    return np.concatenate([[0], np.cumsum(width)])


def byte_tokenizer(vocabulary: int = BYTE_ENTRIES + 1) -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are UTF-8 bytes and 256 is the end of a text.

    Args:
        vocabulary: with 256 entries, byte 0 is the end of a text.
    """
    end = BYTE_ENTRIES if vocabulary > BYTE_ENTRIES else 0
    backend = _byte_level(models.BPE(vocab=_byte_entries(end), merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    entries = max(BYTE_ENTRIES, end + 1)
    return Tokenizer(backend=backend, bytewise=True, vocabulary=entries, end_of_text=end)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Trains a byte-level BPE; the same texts always give the same tokenizer.

    Args:
        vocabulary: requested number of entries; texts with few distinct words give fewer. 256 have
            room for the bytes alone, without being trained.
    """
    if vocabulary <= BYTE_ENTRIES:
        return byte_tokenizer(BYTE_ENTRIES)
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.encode_special_tokens = True
    return Tokenizer(
        backend=backend,
        bytewise=False,
        vocabulary=backend.get_vocab_size(),
        end_of_text=backend.get_vocab()[END_OF_TEXT],
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a `tokenizer.json`, one that Windlass saved or any other.

    Which tokens are special is what the files beside it say, as for transformers:
    `tokenizer_config.json`, then `special_tokens_map.json`, `config.json` and
    `generation_config.json`. No name is guessed.

    Raises:
        DataError: the file does not exist, is not a tokenizer, has an id that no model has, or
            nothing says which token ends a text.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(read_regular_file(path).decode())
    except OSError as error:
        raise DataError(f"no tokenizer file `{path}`: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is not a `tokenizer.json`: not UTF-8") from None
    except Exception as error:  # noqa: BLE001  tokenizers raises bare `Exception`
        raise DataError(f"`{path}` is not a `tokenizer.json`: {error}") from None
    token, highest = max(backend.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if highest >= _MOST_IDS:
        raise DataError(
            f"`{path}` gives `{shorten(token)}` the id {highest:,}, and ids go up to "
            f"{_MOST_IDS - 1:,}; number its tokens anew"
        )
    backend.no_padding()
    backend.no_truncation()
    for end in (BYTE_ENTRIES, 0):
        if backend.get_vocab() == _byte_entries(end):
            return byte_tokenizer(max(BYTE_ENTRIES, end + 1))
    return _with_special_tokens(path, backend)


def _with_special_tokens(path: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    """A tokenizer whose special tokens are those that the files beside it name."""
    add_named_tokens(path, backend)
    vocabulary = backend.get_vocab()
    named, by_id = special_tokens(path.parent), special_ids(path.parent)
    special = {name: text for name, text in named.items() if text in vocabulary}
    for name, index in by_id.items():
        text = backend.id_to_token(index)
        if text is not None:
            special.setdefault(name, text)
    backend.add_special_tokens(sorted(set(special.values())))
    prefix, suffix = ids_around_text(backend)
    ids = {name: vocabulary[text] for name, text in special.items()}
    end = ids.get("eos_token", ids.get("sep_token", suffix[-1] if suffix else None))
    if end is None and "eos_token" in named:
        raise DataError(
            f"`{path}` has no `{shorten(named['eos_token'])}`, which the files beside it name as "
            "`eos_token`; name a token that it has"
        )
    end = vocabulary.get(END_OF_TEXT) if end is None else end
    if end is None:
        raise DataError(
            f"nothing says which token of `{path}` ends a text; name it as `eos_token` in a "
            f"`{TOKENIZER_CONFIG_FILE}` beside it"
        )
    # Text that spells a special token must not become one.
    backend.encode_special_tokens = True
    return Tokenizer(
        backend=backend,
        bytewise=False,
        vocabulary=max(vocabulary.values()) + 1,  # ids may have gaps
        end_of_text=end,
        mask_token=ids.get("mask_token"),
        class_token=ids.get("cls_token", prefix[0] if prefix and suffix else None),
        bos_token=ids.get("bos_token"),
        prefix=prefix,
        suffix=suffix,
        special=special,
    )


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_entries(end: int) -> dict[str, int]:
    """The entries of a tokenizer of bytes, and of the end of a text."""
    letters = {letter: byte for letter, byte in _byte_letters().items() if byte != end}
    return letters | {END_OF_TEXT: end}


def _byte_letters() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, other bytes for
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others: Iterator[int] = iter(range(0x100, 0x200))
    return {chr(b if b in printable else next(others)): b for b in range(256)}
