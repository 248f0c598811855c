"""Prepares the tokens of a corpus once, and finds them again by the content of its files."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from windlass.atomic_files import (
    atomic_folder,
    file_state,
    one_process,
    read_regular_file,
    storage_errors,
)
from windlass.data.build_dataset import train_corpus_tokenizer, write_token_files
from windlass.data.chat import ChatRows, find_chat_template
from windlass.data.content_hashes import DataProgress, HashedFile, hash_files
from windlass.data.corpus_split import CorpusReader
from windlass.data.readers import RowFormat, TextRows
from windlass.data.sources import Corpora, find_corpora
from windlass.data.token_files import TokenDataset, open_dataset
from windlass.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from windlass.data.tokenizer_folder import special_ids, special_tokens
from windlass.document import Document
from windlass.errors import DataError, StorageError, did_you_mean
from windlass.schema import BYTE_ENTRIES, DataRequest

_FORMAT = 5
"""Version number, raised when the same text would be read, split or encoded differently."""


_HashedCorpora = tuple[tuple[HashedFile, ...], ...]
"""The files of each corpus, the one for validation last."""


class DatasetRecipe(Document):
    """Everything that the tokens depend on; its fingerprint names their folder."""

    format: int = _FORMAT
    corpora: tuple[tuple[tuple[str, int, str], ...], ...]
    """Name, bytes and SHA-256 of each file of each corpus, the one for validation last."""
    text_field: str | None
    """Field of tables that holds the text; None if no file is a table."""
    tokenizer: str
    """`byte`, `bpe`, or the SHA-256 of a `tokenizer.json`."""
    vocabulary: int | None
    """Vocabulary size of a trained tokenizer; None if it is not trained."""
    held_out: float | None
    """Share of documents to hold out; None with a corpus for validation."""
    limit_bytes: int | None
    chat_template: str | None = None
    """Hash of the template of conversations, and of the special tokens that it may name."""


def prepare_dataset(
    data: DataRequest, *, cache: Path, progress: DataProgress | None = None
) -> TokenDataset:
    """The tokens of a request's text, from the cache if its files were tokenised like this before.

    Raises:
        DataError: the source or tokenizer is missing, empty, too short or changed while read.
    """
    corpora, rows = find_corpora(data), _row_format(data)
    if not rows.reads_text:
        corpora = corpora.tables(rows)
    report = progress or _ignore_progress
    hashed = tuple(hash_files(corpus.files, cache, report) for corpus in corpora.every)
    _refuse_validation_in_training(corpora, hashed)
    recipe = _recipe(data, corpora, hashed, rows)
    folder = cache / recipe.fingerprint()
    notes = tuple(corpus.note for corpus in corpora.every if corpus.note is not None)
    tokens = open_dataset(folder)
    if tokens is not None:
        return replace(tokens, notes=notes + _template_notes(tokens))
    reader = CorpusReader(
        corpora=corpora,
        rows=rows,
        limit_bytes=data.limit_bytes,
        held_out=data.held_out,
    )
    with storage_errors(cache), _exclusive(folder, report):
        # Another process may have prepared them while this one waited.
        tokens = open_dataset(folder)
        if tokens is None:
            _prepare(folder, reader, data, report, hashed)
            tokens = open_dataset(folder)
    if tokens is None:
        raise StorageError(
            f"`{folder}` does not contain what was just written to it; check its disk"
        )
    return replace(tokens, notes=notes + _template_notes(tokens))


def _template_notes(tokens: TokenDataset) -> tuple[str, ...]:
    """What the template of conversations keeps from being learned."""
    count = 0 if tokens.meta.prompts is None else tokens.meta.prompts.read_answers
    if not count:
        return ()
    note = (
        f"{count:,} answers are read and not learned: the chat template leaves a part of them out, "
        "such as thoughts, once other turns follow; make a row of each to learn them"
    )
    return (note,)


def text_fingerprint(data: DataRequest, *, cache: Path) -> str:
    """Twelve hexadecimal digits of the names and contents of a request's files.

    Unlike the tokens' fingerprint, it stays the same when the text is tokenised in another way.

    Raises:
        DataError: a source is missing or cannot be read.
    """
    corpora = find_corpora(data)
    files = (hash_files(corpus.files, cache, _ignore_progress) for corpus in corpora.every)
    content = "\n".join(f"{file.sha256} {file.name}" for file in chain.from_iterable(files))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _row_format(data: DataRequest) -> RowFormat:
    """How the request's tables are read."""
    if data.format == "text":
        return TextRows(data.text_field)
    template = find_chat_template(
        data.tokenizer, data.chat_template, variables=data.chat_template_kwargs,
        date=data.chat_date,
    )  # fmt: skip
    return ChatRows(template)


def _recipe(
    data: DataRequest, corpora: Corpora, hashed: _HashedCorpora, rows: RowFormat
) -> DatasetRecipe:
    files = (file for corpus in corpora.every for file in corpus.files)
    tables = any(file.table_format(rows) for file in files)
    tokenizer = data.tokenizer
    is_small = tokenizer == "byte" and data.vocabulary == BYTE_ENTRIES
    return DatasetRecipe(
        corpora=tuple(
            tuple((content.name, content.nbytes, content.sha256) for content in corpus)
            for corpus in hashed
        ),
        text_field=data.text_field if tables and rows.reads_text else None,
        tokenizer=tokenizer if tokenizer in ("byte", "bpe") else _tokenizer_hash(tokenizer),
        vocabulary=data.vocabulary if tokenizer == "bpe" or is_small else None,
        held_out=data.held_out if corpora.validation is None else None,
        limit_bytes=data.limit_bytes,
        chat_template=rows.template.fingerprint if isinstance(rows, ChatRows) else None,
    )


def _refuse_validation_in_training(corpora: Corpora, hashed: _HashedCorpora) -> None:
    """Refuses files of the validation text that are also trained on."""
    if corpora.validation is None:
        return
    *training, validation = hashed
    trained_on = {
        content.sha256: f"`{content.name}` of `{corpus.source}`"
        for corpus, contents in zip(corpora.training, training, strict=True)
        for content in contents
        if content.nbytes
    }
    both = [content for content in validation if content.sha256 in trained_on]
    if both:
        more = f", and {len(both) - 1} more of its files" if len(both) > 1 else ""
        raise DataError(
            f"`{both[0].name}` of `data.validation` = `{corpora.validation.source}` is also "
            f"trained on, as {trained_on[both[0].sha256]}{more}; take it out of `data.source`"
        )


def _ignore_progress(label: str, done: int, total: int | None) -> None:
    """Does nothing."""


def _tokenizer_hash(path: str) -> str:
    file = Path(path).expanduser()
    try:
        content = read_regular_file(file)
        special = [special_tokens(file.parent), special_ids(file.parent)]
        return hashlib.sha256(content + json.dumps(special, sort_keys=True).encode()).hexdigest()
    except OSError:
        suggestion = did_you_mean(path, ["byte", "bpe"])
        raise DataError(
            f"no tokenizer `{path}`{suggestion or '; write `byte`, `bpe`, or a `tokenizer.json`'}"
        ) from None


def _prepare(
    folder: Path,
    reader: CorpusReader,
    data: DataRequest,
    progress: DataProgress,
    hashed: _HashedCorpora,
) -> None:
    """Builds a folder of tokens, which appears if no source file has changed.

    Args:
        hashed: state of the corpus's files before reading.
    """
    with atomic_folder(folder, replaces=True) as temporary:  # a damaged one is replaced
        summary = reader.summarize(progress)
        name = data.tokenizer
        tokenizer: Tokenizer
        if name == "byte":
            tokenizer = byte_tokenizer(data.vocabulary)
        elif name == "bpe":
            tokenizer = train_corpus_tokenizer(reader, summary, data.vocabulary, progress)
        else:
            tokenizer = load_tokenizer(Path(name).expanduser())
        write_token_files(temporary, reader, summary, tokenizer, progress)
        _check_unchanged(reader.corpora, hashed)


def _check_unchanged(corpora: Corpora, hashed: _HashedCorpora) -> None:
    files = chain.from_iterable(corpus.files for corpus in corpora.every)
    for file, content in zip(files, chain.from_iterable(hashed), strict=True):
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
    lock = folder.with_name(f".{folder.name}.lock")
    with one_process(lock, lambda: progress("waiting for another process", 0, None)):
        yield
