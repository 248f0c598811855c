"""Prepare: the tokens of a corpus, made once and found again by the content of its files."""

import contextlib
import fcntl
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from windlass.atomic_files import hash_file, storage_errors, fsync_folder
from windlass.data.build_dataset import CorpusReader, write_token_files, train_corpus_tokenizer
from windlass.data.content_hashes import HashedFile, DataProgress, hash_files, file_state
from windlass.data.sources import TABLE_SUFFIXES, Corpus, find_corpus
from windlass.data.token_files import TokenDataset, open_dataset
from windlass.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from windlass.document import Document
from windlass.errors import DataError, StorageError, did_you_mean

_FORMAT = 1
"""Raised when the same text would be read, split or encoded in another way."""


class DatasetRecipe(Document):
    """All that the tokens depend on; its fingerprint names their folder."""

    format: int = _FORMAT
    files: tuple[tuple[str, int, str], ...]
    """Name, bytes and SHA-256 of each."""
    text_field: str | None
    """None: no file is a table."""
    tokenizer: str
    """`byte`, `bpe`, or the SHA-256 of a `tokenizer.json`."""
    vocabulary: int | None
    """None: the tokenizer is not trained."""
    held_out: float
    limit_bytes: int | None


def prepare_dataset(
    source: str,
    *,
    tokenizer: str = "bpe",
    vocabulary: int = 4096,
    held_out: float = 0.05,
    text_field: str = "text",
    limit_bytes: int | None = None,
    cache: Path,
    progress: DataProgress | None = None,
) -> TokenDataset:
    """The tokens of a corpus, from the cache if its files have been tokenised like this before.

    Args:
        source: `stdlib`, a folder, a file, or `hf:name[@config][:split]`.
        tokenizer: `byte`, `bpe` (trained on the training documents), or a `tokenizer.json`.
        vocabulary: entries of a trained tokenizer.
        held_out: share of documents that is never trained on.
        text_field: the field of a table that holds the text.
        limit_bytes: takes only so much text, in the corpus's order; None takes all.
        cache: folder of all prepared corpora.
        progress: told how far a first preparation is.

    Raises:
        DataError: the source or tokenizer is missing, empty, too short or changed while read.
        Faults: all that cannot be read of it.
        StorageError: the disk is full or closed.
    """
    corpus = find_corpus(source)
    told = progress or _silent
    hashed = hash_files(corpus.files, cache, told)
    tables = any(file.path.suffix in TABLE_SUFFIXES for file in corpus.files)
    recipe = DatasetRecipe(
        files=tuple((content.name, content.nbytes, content.sha256) for content in hashed),
        text_field=text_field if tables else None,
        tokenizer=tokenizer if tokenizer in ("byte", "bpe") else _tokenizer_hash(tokenizer),
        vocabulary=vocabulary if tokenizer == "bpe" else None,
        held_out=held_out,
        limit_bytes=limit_bytes,
    )
    folder = cache / recipe.fingerprint()
    tokens = open_dataset(folder)
    if tokens is not None:
        return tokens
    reading = CorpusReader(
        corpus=corpus, text_field=text_field, limit_bytes=limit_bytes, held_out=held_out
    )
    with storage_errors(cache), _alone(folder, told):
        # Another process may have made them while this one waited.
        tokens = open_dataset(folder)
        if tokens is None:
            _make(folder, reading, (tokenizer, vocabulary), told, hashed)
            tokens = open_dataset(folder)
    if tokens is None:
        raise StorageError(f"`{folder}` does not hold what was just written to it; is its disk ok?")
    return tokens


def _silent(label: str, done: int, total: int | None) -> None:
    """Progress that nobody asked for."""


def _tokenizer_hash(path: str) -> str:
    try:
        return hash_file(Path(path).expanduser())
    except OSError:
        near = did_you_mean(path, ["byte", "bpe"])
        raise DataError(
            f"no tokenizer `{path}`{near or '; write `byte`, `bpe`, or a `tokenizer.json`'}"
        ) from None


def _make(
    folder: Path,
    reading: CorpusReader,
    asked: tuple[str, int],
    progress: DataProgress,
    hashed: tuple[HashedFile, ...],
) -> None:
    """Builds beside `folder` and moves it into place when it is whole and still true."""
    for rest in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(rest, ignore_errors=True)  # of a process that was killed
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        survey = reading.summarize(progress)
        name, vocabulary = asked
        tokenizer: Tokenizer
        if name == "byte":
            tokenizer = byte_tokenizer()
        elif name == "bpe":
            tokenizer = train_corpus_tokenizer(reading, survey, vocabulary, progress)
        else:
            tokenizer = load_tokenizer(Path(name).expanduser())
        write_token_files(beside, reading, survey, tokenizer, progress)
        _unchanged(reading.corpus, hashed)
        if folder.exists():
            shutil.rmtree(folder)  # damaged, or it would have been opened
        beside.rename(folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _unchanged(corpus: Corpus, hashed: tuple[HashedFile, ...]) -> None:
    for file, content in zip(corpus.files, hashed, strict=True):
        try:
            same = file_state(file.path) == content.state
        except OSError:
            same = False
        if not same:
            raise DataError(f"`{file.path}` changed while it was being read; start again")


@contextlib.contextmanager
def _alone(folder: Path, progress: DataProgress) -> Iterator[None]:
    """Holds the only right to make `folder`; the system lifts it when a process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(f"`{folder.parent}` cannot be made: {error.strerror}") from None
    with folder.with_name(f".{folder.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
