"""Writes an excerpt of a token folder: some documents, or beginnings of texts as documents."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from windlass.atomic_files import atomic_write, storage_errors
from windlass.data.packing import RowBatches, RowLayout
from windlass.data.token_files import (
    HELD_OUT_BYTES_FILE,
    LENGTH_TYPE,
    META_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    WEIGHT_TYPE,
    SplitMeta,
    TokenDataset,
    document_files,
    file_meta,
    token_file,
    weights_file,
)

_DOCUMENT = b"excerpt"

Spans = Sequence[range]
"""Where documents stand among the tokens of a split."""


def write_excerpt(
    tokens: TokenDataset, folder: Path, *, train: Sequence[Spans], held_out: Spans
) -> None:
    """Writes a token folder with some documents of another one.

    Statistics of the text stay those of the other one.

    Args:
        folder: folder to create; it must not exist.
        train: the documents of each source.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True)
        splits = {
            "train": _write_split(folder, "train", tokens, train),
            # The held-out text has one part, whatever the number of sources.
            "held_out": _write_split(folder, "held_out", tokens, [held_out]),
        }
        lengths = _taken(tokens.held_out_bytes, held_out).astype(LENGTH_TYPE)
        (folder / HELD_OUT_BYTES_FILE).write_bytes(lengths.tobytes())
        tokens.tokenizer.save(folder / TOKENIZER_FILE)
        if tokens.conversations is not None:
            tokens.conversations.template.save(folder)
        files = {path.name: file_meta(path) for path in sorted(folder.iterdir())}
        content = tokens.meta.model_copy(update={**splits, "files": files}).to_json().encode()
        atomic_write(folder / META_FILE, content)
        atomic_write(folder / SEAL_FILE, hashlib.sha256(content).hexdigest())


def beginnings(
    tokens: TokenDataset, *, train: Sequence[int], held_out: int, documents: int, uneven: bool
) -> tuple[list[Spans], Spans]:
    """The beginnings of the texts of each source, and of the held-out text, cut into documents.

    Args:
        train: most tokens to take from each source.
        held_out: most held-out tokens to take.
        documents: number of documents of each text.
        uneven: whether they have all lengths from short to long; otherwise nearly one length.
    """
    sources = tokens.meta.train.sources
    firsts = accumulate((part.tokens for part in sources), initial=0)
    return [
        _cut(first, min(count, part.tokens), documents, uneven=uneven)
        for first, count, part in zip(firsts, train, sources, strict=False)
    ], _cut(0, min(held_out, len(tokens.held_out)), documents, uneven=uneven)


def documents_of_rows(
    batches: RowBatches, *, train: Sequence[int], held_out: int
) -> tuple[list[Spans], Spans]:
    """The documents of some rows: those that share a row with the most, and others between.

    Args:
        train: number of rows of each source.
        held_out: number of held-out rows.
    """
    index, order = batches.tokens.documents, batches.order
    begun = accumulate((part.documents for part in batches.tokens.meta.train.sources), initial=0)
    return [
        _documents(layout, count, index.starts[first:])
        for first, count, layout in zip(begun, train, order.train, strict=False)
    ], _documents(order.held_out, held_out, batches.tokens.held_out_documents.starts)


def _documents(layout: RowLayout, count: int, starts: npt.NDArray[np.int64]) -> Spans:
    """The documents of so many rows, in their order in the split."""
    rows = range(len(layout))
    fullest = sorted(rows, key=lambda row: -len(layout.row(row)))[: count // 2]
    spread = [index * len(layout) // count for index in range(count)]
    chosen = [*dict.fromkeys([*fullest, *spread, *rows[:count]])][:count]
    documents = sorted(int(layout.documents[i]) for row in chosen for i in layout.row(row))
    return [range(int(starts[each]), int(starts[each + 1])) for each in documents]


def _cut(first: int, count: int, documents: int, *, uneven: bool) -> Spans:
    # Long and short ones in turn, as no order of a packing would leave them.
    sizes = [(5 * index) % documents + 1 if uneven else 1 for index in range(documents)]
    ends = [first + count * done // sum(sizes) for done in accumulate(sizes, initial=0)]
    return [range(begin, end) for begin, end in pairwise(ends) if begin < end]


def _write_split(
    folder: Path, name: str, tokens: TokenDataset, parts: Sequence[Spans]
) -> SplitMeta:
    """Writes one side of the split, part by part, and returns what describes it."""
    meta: SplitMeta = getattr(tokens.meta, name)
    spans = [span for part in parts for span in part]
    content = _taken(getattr(tokens, name), spans)
    (folder / token_file(name)).write_bytes(content.tobytes())
    targets = None
    if tokens.conversations is not None:
        weights = _taken(getattr(tokens.conversations, f"{name}_weights"), spans)
        (folder / weights_file(name)).write_bytes(weights.astype(WEIGHT_TYPE).tobytes())
        targets = int(np.count_nonzero(weights))
    offsets_file, names_file = document_files(name)
    (folder / names_file).write_bytes(_DOCUMENT * len(spans))
    starts = list(accumulate(map(len, spans), initial=0))
    name_starts = [len(_DOCUMENT) * index for index in range(len(starts))]
    np.save(folder / offsets_file, np.array([starts, name_starts], dtype="<i8"))
    described = [
        source.model_copy(update={"documents": len(part), "tokens": sum(map(len, part))})
        for source, part in zip(meta.sources, parts, strict=False)
    ]
    return meta.model_copy(
        update={
            "sources": tuple(described), "documents": len(spans), "tokens": starts[-1],
            "sha256": hashlib.sha256(content.tobytes()).hexdigest(), "targets": targets,
        }
    )  # fmt: skip


def _taken(values: npt.NDArray[np.generic], spans: Spans) -> npt.NDArray[np.generic]:
    """What some documents have of the values of all tokens."""
    taken: Iterator[npt.NDArray[np.generic]] = (values[span.start : span.stop] for span in spans)
    return np.concatenate([values[:0], *taken])
