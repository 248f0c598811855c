"""Trains the tokenizer of split corpora, and writes all tokens into one folder."""

import hashlib
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from windlass.atomic_files import atomic_write, fsync_folder
from windlass.data.chat import ChatRows, EncodedDocument, encode_documents
from windlass.data.content_hashes import DataProgress
from windlass.data.corpus_split import CorpusReader, CorpusSummary, hash_fraction
from windlass.data.readers import RowFormat, TextDocument
from windlass.data.token_files import (
    HELD_OUT_BYTES_FILE,
    LENGTH_TYPE,
    META_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    WEIGHT_TYPE,
    DatasetMeta,
    PromptsMeta,
    SourceMeta,
    SplitMeta,
    document_files,
    file_meta,
    token_file,
    weights_file,
)
from windlass.data.tokenizer import Tokenizer, train_tokenizer

_MOST_SYSTEM_PROMPTS = 4096
"""Different system prompts that are counted; where there are more, none is that of most rows."""
_BATCH_BYTES, _BATCH_DOCUMENTS = 4 * 2**20, 4096
_TRAINING_BYTES = 64 * 2**20
"""Size of the sample that a tokenizer is trained on; more text would change few merges."""


def train_corpus_tokenizer(
    reader: CorpusReader, summary: CorpusSummary, vocabulary: int, progress: DataProgress
) -> Tokenizer:
    """Trains a tokenizer on the training documents, or on an even sample of a large corpus."""
    share = min(1.0, _TRAINING_BYTES / max(1, summary.train_nbytes))

    def sample() -> Iterator[str]:
        done = 0
        for corpus, item in reader.documents():
            if summary.is_held_out(corpus, item.name):
                continue
            if hash_fraction(item.name, "tokenizer") >= share:
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
        folder: folder to write, which is missing or empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 2**16 else "<u4")
    with ExitStack() as stack:
        train = _SplitWriter(stack, folder, "train", dtype, tokenizer, reader)
        held_out = _SplitWriter(stack, folder, "held_out", dtype, tokenizer, reader)
        lengths = _ByteLengthWriter(stack, folder / HELD_OUT_BYTES_FILE, tokenizer)
        done = 0
        for documents in _encoding_batches(reader.documents()):
            encoded = encode_documents(tokenizer, [document for _, document in documents])
            for (corpus, document), tokens in zip(documents, encoded, strict=True):
                if summary.is_held_out(corpus, document.name):
                    lengths.add(document, tokens)
                    held_out.add(corpus, document, tokens)
                else:
                    train.add(corpus, document, tokens)
            done += sum(document.nbytes for _, document in documents)
            progress("encoding", done, summary.nbytes)
        lengths.close()
        train.close()
        held_out.close()
    tokenizer.save(folder / TOKENIZER_FILE)
    if isinstance(reader.rows, ChatRows):
        reader.rows.template.save(folder)
    meta = _meta(folder, reader.rows, tokenizer, dtype, train, held_out, lengths.target_bytes)
    content = meta.to_json().encode()
    atomic_write(folder / META_FILE, content)
    atomic_write(folder / SEAL_FILE, hashlib.sha256(content).hexdigest())
    fsync_folder(folder)


def _encoding_batches(
    documents: Iterator[tuple[int, TextDocument]],
) -> Iterator[list[tuple[int, TextDocument]]]:
    """Documents in batches that are large enough to keep all cores busy."""
    batch: list[tuple[int, TextDocument]] = []
    nbytes = 0
    for corpus, document in documents:
        batch.append((corpus, document))
        nbytes += document.nbytes
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Writes the ids and document index of one side of the split, and counts what it writes."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        name: str,
        dtype: np.dtype[np.generic],
        tokenizer: Tokenizer,
        reader: CorpusReader,
    ) -> None:
        corpora = reader.corpora
        self.counts = np.zeros(tokenizer.vocabulary, dtype=np.int64)
        """How often each token occurs."""
        self.target_counts = np.zeros_like(self.counts)
        """How often each token is learned."""
        self.systems: Counter[str | None] = Counter()
        """How often each system prompt begins a conversation; None is none that a template has."""
        self.read_answers = 0
        """Answers that are read alone, as the template leaves a part of them out."""
        self.text_hashes = array("Q")
        """64-bit hash of each document's text."""
        self._folder, self._name, self._dtype = folder, name, dtype
        self._sources = tuple(corpus.source for corpus in corpora.every)
        self._names_sources = len(corpora.training) > 1
        self._by_source = np.zeros((len(self._sources), 3), dtype=np.int64)
        """Documents, tokens and bytes of each source, `Int[source 3]`."""
        self._file = stack.enter_context((folder / token_file(name)).open("xb"))
        self._names = stack.enter_context((folder / document_files(name)[1]).open("xb"))
        self._weights: BinaryIO | None = None
        if isinstance(reader.rows, ChatRows):
            self._weights = stack.enter_context((folder / weights_file(name)).open("xb"))
        self._digest = hashlib.sha256()
        self._starts, self._name_starts = array("q", [0]), array("q", [0])

    def add(self, source: int, document: TextDocument, tokens: EncodedDocument) -> None:
        """Appends a document; the documents of a source follow each other."""
        stored = learned = tokens.ids.astype(self._dtype)
        content = stored.tobytes()
        self._file.write(content)
        self._digest.update(content)
        if self._weights is not None and tokens.weights is not None:
            self._weights.write(tokens.weights.astype(WEIGHT_TYPE).tobytes())
            learned = stored[tokens.weights > 0]
        self.counts += np.bincount(stored, minlength=len(self.counts))
        self.target_counts += np.bincount(learned, minlength=len(self.counts))
        if document.system in self.systems or len(self.systems) < _MOST_SYSTEM_PROMPTS:
            self.systems[document.system] += 1
        self.read_answers += document.read_answers
        text_hash = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
        self.text_hashes.append(int.from_bytes(text_hash, "little"))
        prefix = f"{self._sources[source]}: " if self._names_sources else ""
        name = f"{prefix}{document.name}".encode(errors="replace")
        self._names.write(name)
        self._starts.append(self._starts[-1] + len(stored))
        self._name_starts.append(self._name_starts[-1] + len(name))
        self._by_source[source] += (1, len(stored), document.nbytes)

    def close(self) -> None:
        """Flushes all files to disk."""
        for file in (self._file, self._names, *((self._weights,) if self._weights else ())):
            _flush_and_close(file)
        with (self._folder / document_files(self._name)[0]).open("xb") as file:
            np.save(file, np.array([self._starts, self._name_starts], dtype="<i8"))
            _flush_and_close(file)

    def meta(self) -> SplitMeta:
        """What was written."""
        documents, tokens, nbytes = self._by_source.sum(axis=0).tolist()
        return SplitMeta(
            sources=tuple(
                SourceMeta(source=source, documents=row[0], tokens=row[1], nbytes=row[2])
                for source, row in zip(self._sources, self._by_source.tolist(), strict=True)
                if row[0]
            ),
            documents=documents,
            tokens=tokens,
            nbytes=nbytes,
            duplicates=documents - len(np.unique(np.array(self.text_hashes))),
            targets=int(self.target_counts.sum()) if self._weights else None,
            sha256=self._digest.hexdigest(),
        )


class _ByteLengthWriter:
    """Writes how many bytes of text each held-out token stands for."""

    def __init__(self, stack: ExitStack, path: Path, tokenizer: Tokenizer) -> None:
        self._file = stack.enter_context(path.open("xb"))
        self._tokenizer = tokenizer
        self._by_id = tokenizer.bytes_per_id()
        self.target_bytes = 0
        """Bytes of all tokens that are learned."""

    def add(self, document: TextDocument, tokens: EncodedDocument) -> None:
        """Appends a document; an end of text stands for no byte."""
        lengths = tokens.lengths
        if lengths is not None and tokens.weights is not None:
            self.target_bytes += int(lengths[tokens.weights > 0].sum())
        else:
            self.target_bytes += document.nbytes
            before, behind = (
                len(self._tokenizer.document_prefix),
                len(self._tokenizer.document_suffix),
            )
            ids, by_id = tokens.ids[before : len(tokens.ids) - behind], self._by_id
            lengths = np.zeros(len(tokens.ids), dtype=np.int64)
            lengths[before : before + len(ids)] = (
                by_id[ids] if by_id is not None else self._tokenizer.bytes_per_token(document.text)
            )
        self._file.write(lengths.astype(LENGTH_TYPE).tobytes())

    def close(self) -> None:
        """Flushes the file to disk."""
        _flush_and_close(self._file)


def _prompts_meta(train: _SplitWriter) -> PromptsMeta:
    """How the training conversations begin."""
    systems = train.systems.copy()
    untemplated = systems.pop(None, 0)
    system, count = next(iter(systems.most_common(1)), ("", 0))
    return PromptsMeta(
        conversations=train.meta().documents,
        untemplated=untemplated,
        system=system or "",
        with_system=count,
        read_answers=train.read_answers,
    )


def _flush_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _meta(
    folder: Path,
    rows: RowFormat,
    tokenizer: Tokenizer,
    dtype: np.dtype[np.generic],
    train: _SplitWriter,
    held_out: _SplitWriter,
    target_bytes: int,
) -> DatasetMeta:
    train_meta, held_out_meta = train.meta(), held_out.meta()
    learned, predicted = train.target_counts, held_out.target_counts
    shares = learned[learned > 0] / learned.sum()
    # Add-one smoothing, or a token that never occurs in training would have infinite loss.
    smoothed = np.log((learned + 1) / (learned.sum() + tokenizer.vocabulary))
    held_out_nats = -float(predicted @ smoothed)
    return DatasetMeta(
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        train=train_meta,
        held_out=held_out_meta,
        held_out_in_training=int(np.isin(held_out.text_hashes, train.text_hashes).sum()),
        unused_entries=int((train.counts == 0).sum()),
        bytes_per_token=train_meta.nbytes / train_meta.tokens,
        unigram_nats=-float(shares @ np.log(shares)),
        held_out_unigram_nats=held_out_nats / int(predicted.sum()),
        held_out_unigram_bits_per_byte=held_out_nats / math.log(2) / max(1, target_bytes),
        files={path.name: file_meta(path) for path in sorted(folder.iterdir())},
        chat_template=rows.template.name if isinstance(rows, ChatRows) else None,
        prompts=_prompts_meta(train) if isinstance(rows, ChatRows) else None,
    )
