"""Build: a corpus read, split, its tokenizer trained, and all of it encoded into one folder."""

import hashlib
import math
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from windlass.atomic_files import fsync_folder, atomic_write
from windlass.data.content_hashes import DataProgress
from windlass.data.readers import CHUNK_BYTES, UnreadableDocument, TextDocument
from windlass.data.sources import Corpus
from windlass.data.token_files import (
    HELD_OUT_BYTES_FILE,
    LENGTH_TYPE,
    META_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    DatasetMeta,
    SplitMeta,
    document_files,
    file_meta,
    token_file,
)
from windlass.data.tokenizer import TokenIds, Tokenizer, train_tokenizer
from windlass.errors import DataError, InputErrors

_MOST_FAULTS = 20
_BATCH_BYTES, _BATCH_DOCUMENTS = 4 * 2**20, 4096
_TRAINING_BYTES = 64 * 2**20
"""A tokenizer is trained on a spread sample of about so much; more text changes few merges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReader:
    """How a corpus is read and split."""

    corpus: Corpus
    text_field: str
    limit_bytes: int | None
    held_out: float
    """Share of documents held out: those whose name's hash is below it."""

    def documents(self) -> Iterator[TextDocument]:
        """All documents, once they are known to have no faults."""
        for item in self._items():
            if isinstance(item, TextDocument):
                yield item

    def summarize(self, progress: DataProgress) -> "CorpusSummary":
        """A first pass over all documents, for their number and their faults.

        Raises:
            DataError: nothing to train on or nothing to hold out.
            Faults: what cannot be read.
        """
        faults: list[str] = []
        documents = nbytes = train_nbytes = 0
        lowest, highest = (2.0, ""), (-1.0, "")
        for item in self._items():
            if isinstance(item, UnreadableDocument):
                faults.append(item.message)
                if len(faults) == _MOST_FAULTS:
                    faults.append(f"and maybe more; reading stopped after {_MOST_FAULTS}")
                    break
                continue
            share = hash_fraction(item.name, "split")
            lowest, highest = min(lowest, (share, item.name)), max(highest, (share, item.name))
            documents, nbytes = documents + 1, nbytes + item.nbytes
            train_nbytes += item.nbytes if share >= self.held_out else 0
            if documents % 64 == 0:
                progress("reading", nbytes, None)
        _refuse(self.corpus.source, faults, documents, nbytes)
        # Of a few documents the shares may all fall on one side; then the outermost changes sides.
        border = self.held_out
        if lowest[0] >= border:
            border = math.nextafter(lowest[0], 2)
        elif highest[0] < border:
            border = highest[0]
        return CorpusSummary(documents=documents, nbytes=nbytes, train_nbytes=train_nbytes, held_out_below=border)

    def _items(self) -> Iterator[TextDocument | UnreadableDocument]:
        return self.corpus.documents(text_field=self.text_field, limit_bytes=self.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """What the first pass found."""

    documents: int
    nbytes: int
    train_nbytes: int
    held_out_below: float
    """A document is held out if its share is below this."""

    def is_held_out(self, name: str) -> bool:
        """Whether a document is never trained on."""
        return hash_fraction(name, "split") < self.held_out_below


def hash_fraction(name: str, purpose: str) -> float:
    """A number in [0, 1) that belongs to a document's name, the same on every machine."""
    digest = hashlib.blake2b(f"{purpose}\0{name}".encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest()[:6], "big") / 2**48


def train_corpus_tokenizer(reader: CorpusReader, summary: CorpusSummary, vocabulary: int, progress: DataProgress) -> Tokenizer:
    """A tokenizer trained on the training documents, or on a spread sample of many."""
    share = min(1.0, _TRAINING_BYTES / max(1, summary.train_nbytes))

    def chosen() -> Iterator[str]:
        done = 0
        for item in reader.documents():
            if summary.is_held_out(item.name) or hash_fraction(item.name, "tokenizer") >= share:
                continue
            done += item.nbytes
            progress("training tokenizer", done, round(summary.train_nbytes * share))
            yield item.text

    return train_tokenizer(chosen(), vocabulary)


def write_token_files(
    folder: Path, reader: CorpusReader, summary: CorpusSummary, tokenizer: Tokenizer, progress: DataProgress
) -> None:
    """Writes all files of a folder of tokens, flushed to the disk.

    Args:
        folder: is made; must not be there.
        reading: the same that was surveyed.
        survey: of this reading.
        tokenizer: encodes every document.
        progress: told "encoding" and bytes of text.
    """
    folder.mkdir(parents=True)
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 2**16 else "<u4")
    with ExitStack() as stack:
        train = _Split(stack, folder, "train", dtype, tokenizer)
        held_out = _Split(stack, folder, "held_out", dtype, tokenizer)
        lengths = _Lengths(stack, folder / HELD_OUT_BYTES_FILE, tokenizer)
        done = 0
        for texts in _batches(reader.documents()):
            encoded = tokenizer.encode_batch([text.text for text in texts])
            for text, ids in zip(texts, encoded, strict=True):
                if summary.is_held_out(text.name):
                    held_out.add(text, ids)
                    lengths.add(text, ids)
                else:
                    train.add(text, ids)
            done += sum(text.nbytes for text in texts)
            progress("encoding", done, summary.nbytes)
        lengths.close()
        splits = (train.close(), held_out.close())
    tokenizer.save(folder / TOKENIZER_FILE)
    meta = _meta(folder, reader, tokenizer, dtype, splits, (train.counts, held_out.counts))
    content = meta.to_json().encode()
    atomic_write(folder / META_FILE, content)
    atomic_write(folder / SEAL_FILE, hashlib.sha256(content).hexdigest())
    fsync_folder(folder)


def _refuse(source: str, faults: list[str], documents: int, nbytes: int) -> None:
    if len(faults) == 1:
        raise DataError(faults[0])
    if faults:
        raise InputErrors(faults)
    if documents == 0:
        raise DataError(f"no text in `{source}`: all that was read of it is empty")
    if documents == 1:
        raise DataError(
            f"`{source}` is too short: one document of {nbytes} bytes, and one more is needed to "
            f"be held out; take more text (a lone file is cut into pieces of {CHUNK_BYTES} bytes, "
            "of a small one 1024)"
        )


def _batches(texts: Iterator[TextDocument]) -> Iterator[list[TextDocument]]:
    """Documents in lots large enough to keep all cores at work."""
    lot: list[TextDocument] = []
    nbytes = 0
    for text in texts:
        lot.append(text)
        nbytes += text.nbytes
        if nbytes >= _BATCH_BYTES or len(lot) >= _BATCH_DOCUMENTS:
            yield lot
            lot, nbytes = [], 0
    if lot:
        yield lot


class _Split:
    """Writes the ids and documents of one side of the split."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        name: str,
        dtype: np.dtype[np.generic],
        tokenizer: Tokenizer,
    ) -> None:
        self.counts = np.zeros(tokenizer.vocabulary, dtype=np.int64)
        self._folder, self._name, self._dtype = folder, name, dtype
        self._end = np.array([tokenizer.end_of_text], dtype=dtype)
        self._file = stack.enter_context((folder / token_file(name)).open("xb"))
        self._names = stack.enter_context((folder / document_files(name)[1]).open("xb"))
        self._digest = hashlib.sha256()
        self._starts, self._name_starts = array("q", [0]), array("q", [0])
        self._nbytes = 0

    def add(self, text: TextDocument, ids: TokenIds) -> None:
        """Appends a document and an end of text."""
        stored = np.concatenate([ids.astype(self._dtype), self._end])
        content = stored.tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.counts += np.bincount(stored, minlength=len(self.counts))
        name = text.name.encode(errors="replace")
        self._names.write(name)
        self._starts.append(self._starts[-1] + len(stored))
        self._name_starts.append(self._name_starts[-1] + len(name))
        self._nbytes += text.nbytes

    def close(self) -> SplitMeta:
        """Flushes all files to the disk."""
        _finish(self._file)
        _finish(self._names)
        with (self._folder / document_files(self._name)[0]).open("xb") as file:
            np.save(file, np.array([self._starts, self._name_starts], dtype="<i8"))
            _finish(file)
        return SplitMeta(
            documents=len(self._starts) - 1,
            tokens=self._starts[-1],
            nbytes=self._nbytes,
            sha256=self._digest.hexdigest(),
        )


class _Lengths:
    """Writes how many bytes of text each held-out token stands for."""

    def __init__(self, stack: ExitStack, path: Path, tokenizer: Tokenizer) -> None:
        self._file = stack.enter_context(path.open("xb"))
        self._tokenizer = tokenizer
        self._by_id = tokenizer.bytes_per_id()

    def add(self, text: TextDocument, ids: TokenIds) -> None:
        """Appends a document and an end of text, which stands for no byte."""
        known = self._by_id
        lengths = self._tokenizer.bytes_per_token(text.text) if known is None else known[ids]
        self._file.write(np.append(lengths, 0).astype(LENGTH_TYPE).tobytes())

    def close(self) -> None:
        """Flushes the file to the disk."""
        _finish(self._file)


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _meta(
    folder: Path,
    reading: CorpusReader,
    tokenizer: Tokenizer,
    dtype: np.dtype[np.generic],
    splits: tuple[SplitMeta, SplitMeta],
    counts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> DatasetMeta:
    train, held_out = splits
    shares = counts[0][counts[0] > 0] / train.tokens
    # One more of each, or a token that training never saw would cost infinitely much.
    smoothed = np.log((counts[0] + 1) / (train.tokens + tokenizer.vocabulary))
    held_out_nats = -float(counts[1] @ smoothed)
    return DatasetMeta(
        source=reading.corpus.source,
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        train=train,
        held_out=held_out,
        bytes_per_token=train.nbytes / train.tokens,
        unigram_nats=-float(shares @ np.log(shares)),
        held_out_unigram_nats=held_out_nats / held_out.tokens,
        held_out_unigram_bits_per_byte=held_out_nats / math.log(2) / held_out.nbytes,
        files={path.name: file_meta(path) for path in sorted(folder.iterdir())},
    )
