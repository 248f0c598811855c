"""Writes an excerpt of a token folder: the first tokens of each source and of the held-out text."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from windlass.atomic_files import atomic_write, storage_errors
from windlass.data.token_files import (
    HELD_OUT_BYTES_FILE,
    LENGTH_TYPE,
    META_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    SplitMeta,
    StoredTokenIds,
    TokenDataset,
    document_files,
    file_meta,
    token_file,
)

_DOCUMENT = b"excerpt"


def write_excerpt(
    tokens: TokenDataset, folder: Path, *, train: Sequence[int], held_out: int, documents: int = 1
) -> None:
    """Writes a token folder with the beginnings of another one's texts, each as some documents.

    Conversations become text: all of their tokens are targets.

    Statistics of the text stay those of the other one.

    Args:
        tokens: the tokens to take from.
        folder: folder to create; it must not exist.
        train: most tokens to take from each source.
        held_out: most held-out tokens to take.
        documents: number of documents of each text, of nearly one length.

    Raises:
        StorageError: the disk is full or not writable.
    """
    rings = accumulate((part.tokens for part in tokens.meta.train.sources), initial=0)
    parts = [
        tokens.train[first : first + min(count, part.tokens)]
        for first, count, part in zip(rings, train, tokens.meta.train.sources, strict=False)
    ]
    beginning = tokens.held_out[:held_out]
    with storage_errors(folder):
        folder.mkdir(parents=True)
        splits = {
            "train": _write_split(folder, "train", parts, tokens.meta.train, documents),
            "held_out": _write_split(
                folder, "held_out", [beginning], tokens.meta.held_out, documents
            ),
        }
        lengths = tokens.held_out_bytes[: len(beginning)].astype(LENGTH_TYPE)
        (folder / HELD_OUT_BYTES_FILE).write_bytes(lengths.tobytes())
        tokens.tokenizer.save(folder / TOKENIZER_FILE)
        files = {path.name: file_meta(path) for path in sorted(folder.iterdir())}
        update = {**splits, "files": files, "chat_template": None}
        content = tokens.meta.model_copy(update=update).to_json().encode()
        atomic_write(folder / META_FILE, content)
        atomic_write(folder / SEAL_FILE, hashlib.sha256(content).hexdigest())


def _write_split(
    folder: Path, name: str, parts: Sequence[StoredTokenIds], meta: SplitMeta, documents: int
) -> SplitMeta:
    """Writes one side of the split, each part as some documents, and returns what describes it."""
    content = b"".join(part.tobytes() for part in parts)
    (folder / token_file(name)).write_bytes(content)
    offsets_file, names_file = document_files(name)
    pieces = [piece for part in parts for piece in np.array_split(part, documents)]
    (folder / names_file).write_bytes(_DOCUMENT * len(pieces))
    starts = list(accumulate(map(len, pieces), initial=0))
    name_starts = [len(_DOCUMENT) * index for index in range(len(starts))]
    np.save(folder / offsets_file, np.array([starts, name_starts], dtype="<i8"))
    # The beginning of the held-out text has one part, whatever the number of sources.
    described = [
        source.model_copy(update={"documents": documents, "tokens": len(part)})
        for source, part in zip(meta.sources, parts, strict=False)
    ]
    return meta.model_copy(
        update={
            "sources": tuple(described), "documents": len(pieces), "tokens": starts[-1],
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    )  # fmt: skip
