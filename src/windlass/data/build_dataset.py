"""Reads and splits a corpus, trains its tokenizer, and writes all tokens into one folder."""

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

from windlass.atomic_files import atomic_write, fsync_folder
from windlass.data.content_hashes import DataProgress
from windlass.data.readers import CHUNK_BYTES, TextDocument, UnreadableDocument
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

_MAX_ERRORS = 20
_BATCH_BYTES, _BATCH_DOCUMENTS = 4 * 2**20, 4096
_TRAINING_BYTES = 64 * 2**20
"""Size of the sample that a tokenizer is trained on; more text would change few merges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReader:
    """Reads a corpus and splits it into training and held-out documents."""

    corpus: Corpus
    text_field: str
    limit_bytes: int | None
    held_out: float
    """Share of documents to hold out: those whose name's hash is below it."""

    def documents(self) -> Iterator[TextDocument]:
        """All documents; `summarize` must have found no errors."""
        for item in self._items():
            if isinstance(item, TextDocument):
                yield item

    def summarize(self, progress: DataProgress) -> "CorpusSummary":
        """Reads all documents once to count them and collect errors.

        Raises:
            DataError: there is nothing to train on or nothing to hold out.
            InputErrors: several documents cannot be read.
        """
        errors: list[str] = []
        documents = nbytes = train_nbytes = 0
        lowest, highest = (2.0, ""), (-1.0, "")
        for item in self._items():
            if isinstance(item, UnreadableDocument):
                errors.append(item.message)
                if len(errors) == _MAX_ERRORS:
                    errors.append(f"and maybe more; reading stopped after {_MAX_ERRORS}")
                    break
                continue
            fraction = hash_fraction(item.name, "split")
            lowest = min(lowest, (fraction, item.name))
            highest = max(highest, (fraction, item.name))
            documents, nbytes = documents + 1, nbytes + item.nbytes
            train_nbytes += item.nbytes if fraction >= self.held_out else 0
            if documents % 64 == 0:
                progress("reading", nbytes, None)
        _check_readable(self.corpus.source, errors, documents, nbytes)
        # A few documents may all fall on one side; then the outermost one changes sides.
        threshold = self.held_out
        if lowest[0] >= threshold:
            threshold = math.nextafter(lowest[0], 2)
        elif highest[0] < threshold:
            threshold = highest[0]
        return CorpusSummary(
            documents=documents, nbytes=nbytes, train_nbytes=train_nbytes, held_out_below=threshold
        )

    def _items(self) -> Iterator[TextDocument | UnreadableDocument]:
        return self.corpus.documents(text_field=self.text_field, limit_bytes=self.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """Size of a corpus and the threshold of its split."""

    documents: int
    nbytes: int
    """Bytes of all text in UTF-8."""
    train_nbytes: int
    """Bytes of training text in UTF-8."""
    held_out_below: float
    """Documents whose hash fraction is below this are held out."""

    def is_held_out(self, name: str) -> bool:
        """Whether a document is never trained on."""
        return hash_fraction(name, "split") < self.held_out_below


def hash_fraction(name: str, purpose: str) -> float:
    """A number in [0, 1) from the hash of a document's name, the same on every machine."""
    digest = hashlib.blake2b(f"{purpose}\0{name}".encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest()[:6], "big") / 2**48


def train_corpus_tokenizer(
    reader: CorpusReader, summary: CorpusSummary, vocabulary: int, progress: DataProgress
) -> Tokenizer:
    """Trains a tokenizer on the training documents, or on an even sample of a large corpus."""
    share = min(1.0, _TRAINING_BYTES / max(1, summary.train_nbytes))

    def sample() -> Iterator[str]:
        done = 0
        for item in reader.documents():
            if summary.is_held_out(item.name) or hash_fraction(item.name, "tokenizer") >= share:
                continue
            done += item.nbytes
            progress("training tokenizer", done, round(summary.train_nbytes * share))
            yield item.text

    return train_tokenizer(sample(), vocabulary)


def write_token_files(
    folder: Path,
    reader: CorpusReader,
    summary: CorpusSummary,
    tokenizer: Tokenizer,
    progress: DataProgress,
) -> None:
    """Writes all files of a token folder and flushes them to disk.

    Args:
        folder: folder to create; it must not exist.
        reader: reader of the corpus.
        summary: summary of the same reader.
        tokenizer: tokenizer that encodes every document.
        progress: called with "encoding" and bytes of text.
    """
    folder.mkdir(parents=True)
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 2**16 else "<u4")
    with ExitStack() as stack:
        train = _SplitWriter(stack, folder, "train", dtype, tokenizer)
        held_out = _SplitWriter(stack, folder, "held_out", dtype, tokenizer)
        lengths = _ByteLengthWriter(stack, folder / HELD_OUT_BYTES_FILE, tokenizer)
        done = 0
        for documents in _encoding_batches(reader.documents()):
            encoded = tokenizer.encode_batch([document.text for document in documents])
            for document, ids in zip(documents, encoded, strict=True):
                if summary.is_held_out(document.name):
                    held_out.add(document, ids)
                    lengths.add(document, ids)
                else:
                    train.add(document, ids)
            done += sum(document.nbytes for document in documents)
            progress("encoding", done, summary.nbytes)
        lengths.close()
        splits = (train.close(), held_out.close())
    tokenizer.save(folder / TOKENIZER_FILE)
    meta = _meta(folder, reader, tokenizer, dtype, splits, (train.counts, held_out.counts))
    content = meta.to_json().encode()
    atomic_write(folder / META_FILE, content)
    atomic_write(folder / SEAL_FILE, hashlib.sha256(content).hexdigest())
    fsync_folder(folder)


def _check_readable(source: str, errors: list[str], documents: int, nbytes: int) -> None:
    if len(errors) == 1:
        raise DataError(errors[0])
    if errors:
        raise InputErrors(errors)
    if documents == 0:
        raise DataError(f"no text in `{source}`: everything that was read of it is empty")
    if documents == 1:
        raise DataError(
            f"`{source}` is too short: it has one document of {nbytes} bytes, and needs another to "
            f"hold out; use more text (a single file is split into chunks of {CHUNK_BYTES} bytes, "
            "a small one into chunks of 1024)"
        )


def _encoding_batches(documents: Iterator[TextDocument]) -> Iterator[list[TextDocument]]:
    """Documents in batches that are large enough to keep all cores busy."""
    batch: list[TextDocument] = []
    nbytes = 0
    for document in documents:
        batch.append(document)
        nbytes += document.nbytes
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Writes the ids and document index of one side of the split."""

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

    def add(self, document: TextDocument, ids: TokenIds) -> None:
        """Appends a document and an end of text."""
        stored = np.concatenate([ids.astype(self._dtype), self._end])
        content = stored.tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.counts += np.bincount(stored, minlength=len(self.counts))
        name = document.name.encode(errors="replace")
        self._names.write(name)
        self._starts.append(self._starts[-1] + len(stored))
        self._name_starts.append(self._name_starts[-1] + len(name))
        self._nbytes += document.nbytes

    def close(self) -> SplitMeta:
        """Flushes all files to disk."""
        _flush_and_close(self._file)
        _flush_and_close(self._names)
        with (self._folder / document_files(self._name)[0]).open("xb") as file:
            np.save(file, np.array([self._starts, self._name_starts], dtype="<i8"))
            _flush_and_close(file)
        return SplitMeta(
            documents=len(self._starts) - 1,
            tokens=self._starts[-1],
            nbytes=self._nbytes,
            sha256=self._digest.hexdigest(),
        )


class _ByteLengthWriter:
    """Writes how many bytes of text each held-out token stands for."""

    def __init__(self, stack: ExitStack, path: Path, tokenizer: Tokenizer) -> None:
        self._file = stack.enter_context(path.open("xb"))
        self._tokenizer = tokenizer
        self._by_id = tokenizer.bytes_per_id()

    def add(self, document: TextDocument, ids: TokenIds) -> None:
        """Appends a document and an end of text, which stands for no byte."""
        if self._by_id is None:
            lengths = self._tokenizer.bytes_per_token(document.text)
        else:
            lengths = self._by_id[ids]
        self._file.write(np.append(lengths, 0).astype(LENGTH_TYPE).tobytes())

    def close(self) -> None:
        """Flushes the file to disk."""
        _flush_and_close(self._file)


def _flush_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _meta(
    folder: Path,
    reader: CorpusReader,
    tokenizer: Tokenizer,
    dtype: np.dtype[np.generic],
    splits: tuple[SplitMeta, SplitMeta],
    counts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> DatasetMeta:
    train, held_out = splits
    shares = counts[0][counts[0] > 0] / train.tokens
    # Add-one smoothing, or a token that never occurs in training would have infinite loss.
    smoothed = np.log((counts[0] + 1) / (train.tokens + tokenizer.vocabulary))
    held_out_nats = -float(counts[1] @ smoothed)
    return DatasetMeta(
        source=reader.corpus.source,
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
