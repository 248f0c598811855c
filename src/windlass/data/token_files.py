"""Opens a tokenised corpus: memory-mapped ids, document index, tokenizer and statistics.

A folder of tokens is either complete or ignored: `meta.json` has the size and hash of every other
file, and `meta.sha256` the hash of `meta.json`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from windlass.atomic_files import hash_file
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.document import Document
from windlass.errors import WindlassError

META_FILE, SEAL_FILE, TOKENIZER_FILE = "meta.json", "meta.sha256", "tokenizer.json"
HELD_OUT_BYTES_FILE = "held_out.bytes.bin"
_Item = TypeVar("_Item", bound=np.generic)
LENGTH_TYPE = np.dtype("<u4")
StoredTokenIds = npt.NDArray[np.unsignedinteger[Any]]
_SAMPLES, _SAMPLE_BYTES = 64, 2**20


class FileMeta(Document):
    """One file of the folder."""

    nbytes: int
    sample_sha256: str
    """SHA-256 of the whole file up to 64 MiB, of 64 evenly spread samples of a larger one."""


class SplitMeta(Document):
    """One side of the split between training and held-out documents."""

    documents: int
    tokens: int
    """Number of tokens, with one end of text per document."""
    nbytes: int
    """Bytes of the text in UTF-8."""
    sha256: str
    """SHA-256 of the token file."""


class DatasetMeta(Document):
    """Statistics of a tokenised corpus, and the hashes of its files."""

    source: str
    vocabulary: int
    end_of_text: int
    dtype: Literal["uint16", "uint32"]
    train: SplitMeta
    held_out: SplitMeta
    bytes_per_token: float
    """Mean bytes of training text per token."""
    unigram_nats: float
    """Entropy of the training tokens: the loss of a model that only knows their frequencies."""
    held_out_unigram_nats: float
    """Loss of that model on the held-out tokens, with add-one smoothing."""
    held_out_unigram_bits_per_byte: float
    """The same loss in bits per byte of held-out text."""
    files: dict[str, FileMeta]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DocumentIndex:
    """Start and name of each document in the tokens of one split."""

    starts: npt.NDArray[np.int64]
    """Token offset of each document, then the number of tokens, `Int[document + 1]`."""
    name_starts: npt.NDArray[np.int64]
    """Byte offset of each name, then the number of bytes, `Int[document + 1]`."""
    names: npt.NDArray[np.uint8]
    """All names in UTF-8, concatenated."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def name(self, index: int) -> str:
        """Name of the document at `index`."""
        first, end = self.name_starts[index : index + 2]
        return self.names[first:end].tobytes().decode()

    def between(self, first: int, end: int) -> tuple[str, ...]:
        """Names of the documents that tokens `first` to `end` (exclusive) belong to."""
        low = int(np.searchsorted(self.starts, first, side="right")) - 1
        high = int(np.searchsorted(self.starts, end, side="left"))
        return tuple(self.name(index) for index in range(low, min(high, len(self))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDataset:
    """A tokenised corpus on disk."""

    folder: Path
    vocabulary: int
    train: StoredTokenIds
    """Memory-mapped ids `Int[token]`, with an end of text after each document."""
    held_out: StoredTokenIds
    held_out_bytes: npt.NDArray[np.uint32]
    """Bytes of text that each held-out token stands for, 0 for an end of text, `Int[token]`."""
    documents: DocumentIndex
    """Document index of the training split."""
    tokenizer: Tokenizer
    meta: DatasetMeta
    fingerprint: str
    """Hash of ids and tokenizer, equal wherever the same text was tokenised the same way."""


def token_file(split: str) -> str:
    """Name of the file with the ids of split `train` or `held_out`."""
    return f"{split}.bin"


def document_files(split: str) -> tuple[str, str]:
    """Names of the files with the offsets and the names of a split's documents."""
    return f"{split}.documents.npy", f"{split}.names.txt"


def open_dataset(folder: Path) -> TokenDataset | None:
    """The tokens in a folder; None if it is missing, incomplete or damaged."""
    try:
        meta = _sealed_meta(folder)
        if meta is None or any(
            file_meta(folder / name) != expected for name, expected in meta.files.items()
        ):
            return None
        tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        return TokenDataset(
            folder=folder,
            vocabulary=meta.vocabulary,
            train=_mapped(folder / token_file("train"), np.dtype(meta.dtype)),
            held_out=_mapped(folder / token_file("held_out"), np.dtype(meta.dtype)),
            held_out_bytes=_mapped(folder / HELD_OUT_BYTES_FILE, LENGTH_TYPE),
            documents=_documents(folder, "train"),
            tokenizer=tokenizer,
            meta=meta,
            fingerprint=_fingerprint(meta),
        )
    except (OSError, ValueError, WindlassError):
        return None


def file_meta(path: Path) -> FileMeta:
    """Size and hash of one file; the time to compute it does not grow beyond 64 MiB."""
    nbytes = path.stat().st_size
    if nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return FileMeta(nbytes=nbytes, sample_sha256=hash_file(path))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek((nbytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return FileMeta(nbytes=nbytes, sample_sha256=digest.hexdigest())


def _sealed_meta(folder: Path) -> DatasetMeta | None:
    content = (folder / META_FILE).read_bytes()
    seal = (folder / SEAL_FILE).read_text(encoding="ascii")
    if hashlib.sha256(content).hexdigest() != seal:
        return None
    return DatasetMeta.model_validate_json(content)


def _mapped(path: Path, dtype: np.dtype[_Item]) -> npt.NDArray[_Item]:
    # As a plain array, because slicing a `np.memmap` takes five times as long.
    return np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r").view(np.ndarray)


def _documents(folder: Path, split: str) -> DocumentIndex:
    offsets, names = document_files(split)
    table = np.load(folder / offsets, mmap_mode="r")
    return DocumentIndex(
        starts=table[0], name_starts=table[1], names=_mapped(folder / names, np.dtype(np.uint8))
    )


def _fingerprint(meta: DatasetMeta) -> str:
    parts = (meta.train.sha256, meta.held_out.sha256, meta.files[TOKENIZER_FILE].sample_sha256)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
