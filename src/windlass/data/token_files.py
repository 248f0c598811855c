"""Opens a tokenised corpus: memory-mapped ids, document index, tokenizer and statistics.

A folder of tokens is either complete or ignored: `meta.json` has the size and hash of every other
file, and `meta.sha256` the hash of `meta.json`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from windlass.atomic_files import hash_file
from windlass.data.chat import ChatTemplate, find_chat_template
from windlass.data.content_hashes import hash_files
from windlass.data.keyed_choices import source_mixture
from windlass.data.readers import SourceFile
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.document import Document
from windlass.errors import WindlassError
from windlass.schema import DataRequest

META_FILE, SEAL_FILE, TOKENIZER_FILE = "meta.json", "meta.sha256", "tokenizer.json"
HELD_OUT_BYTES_FILE = "held_out.bytes.bin"
_Item = TypeVar("_Item", bound=np.generic)
LENGTH_TYPE, WEIGHT_TYPE = np.dtype("<u4"), np.dtype("<f4")
StoredTokenIds = npt.NDArray[np.unsignedinteger[Any]]
_LARGE_BYTES = 64 * 2**20
"""Size above which a file is read again only if its state on disk has changed. Smaller ones are
hashed whenever they are opened, which takes 0.5 s of a core per GB."""


class FileMeta(Document):
    """One file of the folder."""

    nbytes: int
    sha256: str


class SourceMeta(Document):
    """The part of one side of the split that comes from one source."""

    source: str
    documents: int
    tokens: int
    nbytes: int
    """Bytes of the text in UTF-8."""


class SplitMeta(Document):
    """One side of the split between training and held-out documents."""

    sources: tuple[SourceMeta, ...]
    """The parts of the sources, which follow each other in the tokens."""
    documents: int
    tokens: int
    """Number of tokens, with one end of text per document."""
    nbytes: int
    """Bytes of the text in UTF-8."""
    sha256: str
    """SHA-256 of the token file."""
    duplicates: int
    """Documents whose text is that of an earlier one, by a hash of 64 bits."""
    targets: int | None = None
    """Tokens that are learned; None means all."""

    @property
    def source(self) -> str:
        """The names of all sources."""
        return ", ".join(part.source for part in self.sources)


class PromptsMeta(Document):
    """How the training conversations begin."""

    conversations: int
    untemplated: int
    """Those that are a prompt and a completion, which no template surrounds."""
    system: str
    """The system prompt that most of the others begin with; empty if that is none."""
    with_system: int
    """Those that begin with it."""
    read_answers: int = 0
    """Answers of them that are not learned, since the template leaves a part of each out, such as
    thoughts, once other turns follow."""


class DatasetMeta(Document):
    """Statistics of a tokenised corpus, and the hashes of its files."""

    vocabulary: int
    end_of_text: int
    dtype: Literal["uint16", "uint32"]
    train: SplitMeta
    held_out: SplitMeta
    held_out_in_training: int
    """Held-out documents whose text is also trained on, by a hash of 64 bits."""
    unused_entries: int
    """Entries of the vocabulary that never occur in the training tokens."""
    bytes_per_token: float
    """Mean bytes of training text per token."""
    unigram_nats: float
    """Entropy of the training tokens: the loss of a model that only knows their frequencies."""
    held_out_unigram_nats: float
    """Loss of that model on the held-out tokens, with add-one smoothing."""
    held_out_unigram_bits_per_byte: float
    """The same loss in bits per byte of held-out text."""
    files: dict[str, FileMeta]
    chat_template: str | None = None
    """Name of the template that conversations were rendered by; None is text."""
    prompts: PromptsMeta | None = None
    """How conversations begin; None is text."""


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

    @property
    def longest(self) -> int:
        """Tokens of the longest document; 0 without any."""
        return int(np.diff(self.starts).max(initial=0))

    def name(self, index: int) -> str:
        """Name of the document at `index`."""
        first, end = self.name_starts[index : index + 2]
        return self.names[first:end].tobytes().decode()

    def between(self, first: int, end: int) -> tuple[str, ...]:
        """Names of the documents that tokens `first` to `end` (exclusive) belong to."""
        low = int(np.searchsorted(self.starts, first, side="right")) - 1
        high = int(np.searchsorted(self.starts, end, side="left"))
        return tuple(self.name(index) for index in range(low, min(high, len(self))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Conversations:
    """What the tokens of conversations have beside those of text.

    A token's weight is that of predicting it, `Float[token]`; 0 is not learned.
    """

    train_weights: npt.NDArray[np.float32]
    held_out_weights: npt.NDArray[np.float32]
    template: ChatTemplate
    """The template that rendered them."""


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
    held_out_documents: DocumentIndex
    conversations: "Conversations | None" = None
    """What else there is of conversations; None is text."""
    tokenizer: Tokenizer
    meta: DatasetMeta
    fingerprint: str
    """Hash of ids and tokenizer, equal wherever the same text was tokenised the same way."""
    notes: tuple[str, ...] = ()
    """What of the sources was not read, a sentence each."""

    @property
    def first_question(self) -> list[int]:
        """Ids of the first conversation up to its first answer; none of a text."""
        if self.conversations is None:
            return []
        end = int(self.documents.starts[1])
        learned = np.flatnonzero(self.conversations.train_weights[:end])
        return [int(token) for token in self.train[: learned[0] if len(learned) else 0]]


def token_file(split: str) -> str:
    """Name of the file with the ids of split `train` or `held_out`."""
    return f"{split}.bin"


def weights_file(split: str) -> str:
    """Name of the file with the weights of a split's tokens as targets."""
    return f"{split}.weights.bin"


def document_files(split: str) -> tuple[str, str]:
    """Names of the files with the offsets and the names of a split's documents."""
    return f"{split}.documents.npy", f"{split}.names.txt"


def open_dataset(folder: Path) -> TokenDataset | None:
    """The tokens in a folder; None if it is missing, incomplete or damaged."""
    try:
        meta = _sealed_meta(folder)
        if meta is None or not _are_intact(folder, meta.files):
            return None
        tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        return TokenDataset(
            folder=folder,
            vocabulary=meta.vocabulary,
            train=_mapped(folder / token_file("train"), np.dtype(meta.dtype)),
            held_out=_mapped(folder / token_file("held_out"), np.dtype(meta.dtype)),
            held_out_bytes=_mapped(folder / HELD_OUT_BYTES_FILE, LENGTH_TYPE),
            documents=_documents(folder, "train"),
            held_out_documents=_documents(folder, "held_out"),
            conversations=_conversations(folder) if meta.chat_template else None,
            tokenizer=tokenizer,
            meta=meta,
            fingerprint=_fingerprint(meta),
        )
    except (OSError, ValueError, WindlassError):
        return None


def held_out_texts(tokens: TokenDataset) -> list[str]:
    """The held-out documents as text."""
    ids = np.asarray(tokens.held_out, dtype=np.int64)
    ends = np.flatnonzero(ids == tokens.tokenizer.end_of_text).tolist()
    starts = [0, *(end + 1 for end in ends)]
    return [
        tokens.tokenizer.decode(ids[start:end].tolist())
        for start, end in zip(starts, ends, strict=False)
    ]


def file_meta(path: Path) -> FileMeta:
    """Size and hash of one file, all of which is read."""
    return FileMeta(nbytes=path.stat().st_size, sha256=hash_file(path))


def _are_intact(folder: Path, files: Mapping[str, FileMeta]) -> bool:
    """Whether the files are as they were written, each byte of them."""
    if any((folder / name).stat().st_size != expected.nbytes for name, expected in files.items()):
        return False
    small = {name: file for name, file in files.items() if file.nbytes <= _LARGE_BYTES}
    if any(hash_file(folder / name) != expected.sha256 for name, expected in small.items()):
        return False
    large = [
        SourceFile(name=name, path=folder / name, single_document=True)
        for name in files.keys() - small.keys()
    ]
    hashed = hash_files(large, folder.parent, lambda *_: None) if large else ()
    return all(file.sha256 == files[file.name].sha256 for file in hashed)


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


def _conversations(folder: Path) -> Conversations:
    return Conversations(
        train_weights=_mapped(folder / weights_file("train"), WEIGHT_TYPE),
        held_out_weights=_mapped(folder / weights_file("held_out"), WEIGHT_TYPE),
        template=find_chat_template(str(folder / TOKENIZER_FILE), None),
    )


def _fingerprint(meta: DatasetMeta) -> str:
    parts = [meta.train.sha256, meta.held_out.sha256, meta.files[TOKENIZER_FILE].sha256]
    if meta.chat_template:
        parts += [meta.files[weights_file(split)].sha256 for split in ("train", "held_out")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


class DatasetStatistics(Document):
    """What a text holds."""

    quantiles: ClassVar[tuple[float, ...]] = (0.0, 0.5, 0.95, 1.0)
    """The quantiles of `document_tokens`: shortest, median, 95 % and longest."""

    meta: DatasetMeta
    """Counts of the training and the held-out side, and of each source."""
    tokens_fingerprint: str
    """Hash of the tokens; runs with equal ones train on the same text."""
    shares: tuple[float, ...]
    """Share of the training sequences that comes from each source."""
    document_tokens: tuple[int, ...]
    """Tokens of a training document at the `quantiles`, with its end of text."""
    notes: tuple[str, ...] = ()
    """What of the sources was not read, a sentence each."""


def dataset_statistics(data: DataRequest, tokens: TokenDataset) -> DatasetStatistics:
    """The statistics of a request's text."""
    sources = tokens.meta.train.sources
    shares = source_mixture(data.weights or [part.tokens for part in sources], 0).shares
    lengths = np.quantile(np.diff(tokens.documents.starts), DatasetStatistics.quantiles)
    return DatasetStatistics(
        meta=tokens.meta,
        tokens_fingerprint=tokens.fingerprint,
        shares=tuple(share / sum(shares) for share in shares),
        document_tokens=tuple(round(length) for length in lengths.tolist()),
        notes=tokens.notes,
    )
