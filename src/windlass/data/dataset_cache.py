"""Prepares the tokens of a corpus once, and finds them again by the content of its files."""

import contextlib
import fcntl
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from windlass.atomic_files import fsync_folder, hash_file, storage_errors
from windlass.data.build_dataset import CorpusReader, train_corpus_tokenizer, write_token_files
from windlass.data.content_hashes import DataProgress, HashedFile, file_state, hash_files
from windlass.data.sources import TABLE_SUFFIXES, Corpus, find_corpus
from windlass.data.token_files import TokenDataset, open_dataset
from windlass.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from windlass.document import Document
from windlass.errors import DataError, StorageError, did_you_mean

_FORMAT = 1
"""Version number, raised when the same text would be read, split or encoded differently."""


class DatasetRecipe(Document):
    """Everything that the tokens depend on; its fingerprint names their folder."""

    format: int = _FORMAT
    files: tuple[tuple[str, int, str], ...]
    """Name, bytes and SHA-256 of each."""
    text_field: str | None
    """Field of tables that holds the text; None if no file is a table."""
    tokenizer: str
    """`byte`, `bpe`, or the SHA-256 of a `tokenizer.json`."""
    vocabulary: int | None
    """Vocabulary size of a trained tokenizer; None if it is not trained."""
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
    """The tokens of a corpus, from the cache if its files were tokenised like this before.

    Args:
        source: `stdlib`, a folder, a file, or `hf:name[@config][:split]`.
        tokenizer: `byte`, `bpe` (trained on the training documents), or a `tokenizer.json`.
        vocabulary: vocabulary size of a trained tokenizer.
        held_out: share of documents that are never trained on.
        text_field: field of a table that holds the text.
        limit_bytes: bytes of text to take, in the corpus's order; None takes all.
        cache: folder of all prepared corpora.
        progress: called with the progress of a first preparation.

    Raises:
        DataError: the source or tokenizer is missing, empty, too short or changed while read.
        InputErrors: several documents cannot be read.
        StorageError: the disk is full or not writable.
    """
    corpus = find_corpus(source)
    report = progress or _ignore_progress
    hashed = hash_files(corpus.files, cache, report)
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
    reader = CorpusReader(
        corpus=corpus, text_field=text_field, limit_bytes=limit_bytes, held_out=held_out
    )
    with storage_errors(cache), _exclusive(folder, report):
        # Another process may have prepared them while this one waited.
        tokens = open_dataset(folder)
        if tokens is None:
            _prepare(folder, reader, (tokenizer, vocabulary), report, hashed)
            tokens = open_dataset(folder)
    if tokens is None:
        raise StorageError(
            f"`{folder}` does not contain what was just written to it; check its disk"
        )
    return tokens


def _ignore_progress(label: str, done: int, total: int | None) -> None:
    """Does nothing."""


def _tokenizer_hash(path: str) -> str:
    try:
        return hash_file(Path(path).expanduser())
    except OSError:
        suggestion = did_you_mean(path, ["byte", "bpe"])
        raise DataError(
            f"no tokenizer `{path}`{suggestion or '; write `byte`, `bpe`, or a `tokenizer.json`'}"
        ) from None


def _prepare(
    folder: Path,
    reader: CorpusReader,
    request: tuple[str, int],
    progress: DataProgress,
    hashed: tuple[HashedFile, ...],
) -> None:
    """Builds in a temporary folder and renames it to `folder` if no source file has changed.

    Args:
        folder: folder of the finished tokens.
        reader: reader of the corpus.
        request: name of the tokenizer, and the vocabulary size of a trained one.
        progress: called with the progress.
        hashed: state of the corpus's files before reading.
    """
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        summary = reader.summarize(progress)
        name, vocabulary = request
        tokenizer: Tokenizer
        if name == "byte":
            tokenizer = byte_tokenizer()
        elif name == "bpe":
            tokenizer = train_corpus_tokenizer(reader, summary, vocabulary, progress)
        else:
            tokenizer = load_tokenizer(Path(name).expanduser())
        write_token_files(temporary, reader, summary, tokenizer, progress)
        _check_unchanged(reader.corpus, hashed)
        if folder.exists():
            shutil.rmtree(folder)  # damaged, otherwise it would have been opened
        temporary.rename(folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_unchanged(corpus: Corpus, hashed: tuple[HashedFile, ...]) -> None:
    for file, content in zip(corpus.files, hashed, strict=True):
        try:
            unchanged = file_state(file.path) == content.state
        except OSError:
            unchanged = False
        if not unchanged:
            raise DataError(f"`{file.path}` changed while it was being read; start again")


@contextlib.contextmanager
def _exclusive(folder: Path, progress: DataProgress) -> Iterator[None]:
    """Locks the preparation of `folder`; the lock ends when the process does."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(f"`{folder.parent}` cannot be created: {error.strerror}") from None
    with folder.with_name(f".{folder.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
