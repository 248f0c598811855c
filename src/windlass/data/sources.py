"""Finds the files of a corpus, in an order that is the same on every machine."""

import importlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.data.files import COMPRESSED_SUFFIXES, arrow_row_count, plain_suffix
from windlass.data.readers import (
    TABLE_SUFFIXES,
    RowFormat,
    SourceFile,
    TextDocument,
    UnreadableDocument,
    find_json_layout,
    looks_like_text,
    read_documents,
)
from windlass.errors import DataError, did_you_mean, raise_data_errors
from windlass.schema import DataRequest

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
# Tests are installed on some machines only, where they are half of all text.
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Generated character tables: an eighth of the text, so regular that they lower any loss.
_CHARACTER_TABLES = frozenset({"encodings"})
# Files that differ between builds of Python or machines.
_MACHINE_SPECIFIC = ("_sysconfigdata", "config-", "sitecustomize.py")
_NAMED = 5
"""Most files that a note names."""
_SAVED_SPLIT, _SAVED_DICT = "state.json", "dataset_dict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The files of a source, ordered by name."""

    source: str
    files: tuple[SourceFile, ...]
    skip_undecodable: bool = False
    """Whether a file that is not UTF-8 is skipped; otherwise it is an error."""
    left_out: tuple[str, ...] = ()
    """Names of its files that are not read, since they are no text, or no table."""

    def tables(self, rows: RowFormat | None = None) -> "Corpus":
        """The corpus with its tables alone.

        Args:
            rows: what rows are wanted; None tells tables by their names alone.
        """
        files = tuple(file for file in self.files if file.table_format(rows))
        others = (file.name for file in self.files if not file.table_format(rows))
        return replace(self, files=files, left_out=(*self.left_out, *others))

    @property
    def note(self) -> str | None:
        """The files that are not read, in a sentence; None if there are none."""
        if not self.left_out:
            return None
        shown = ", ".join(f"`{name}`" for name in self.left_out[:_NAMED])
        more = len(self.left_out) - _NAMED
        count = f"{len(self.left_out):,} file{'s'[: len(self.left_out) > 1]}"
        return f"{count} of `{self.source}` not read: {shown}" + (
            f" and {more:,} more" * (more > 0)
        )

    def documents(
        self, *, rows: RowFormat, limit_bytes: int | None
    ) -> Iterator[TextDocument | UnreadableDocument]:
        """All documents, or why one cannot be read, in the corpus's order.

        Args:
            limit_bytes: stops after the document that reaches this many bytes; None reads all.
        """
        nbytes = 0
        for file in self.files:
            for item in read_documents(file, rows):
                if isinstance(item, UnreadableDocument):
                    if not self.skip_undecodable:
                        yield item
                    continue
                yield item
                nbytes += item.nbytes
                if limit_bytes is not None and nbytes >= limit_bytes:
                    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpora:
    """The corpora of a request."""

    training: tuple[Corpus, ...]
    validation: Corpus | None
    """Text to evaluate on; None holds out documents of `training`."""

    @property
    def every(self) -> tuple[Corpus, ...]:
        """The training corpora, then the one for validation."""
        return (*self.training, *((self.validation,) if self.validation else ()))

    def tables(self, rows: RowFormat) -> "Corpora":
        """The same corpora without the files that are no tables.

        Raises:
            DataError: a corpus has no table.
        """
        tables = tuple(corpus.tables(rows) for corpus in self.every)
        raise_data_errors(
            [
                f"no conversations in `{corpus.source}`: `data.format=chat` reads JSON lines, "
                "arrays of JSON and Parquet files, folders of them, and Hugging Face data sets"
                for corpus in tables
                if not corpus.files
            ]
        )
        count = len(self.training)
        validation = None if self.validation is None else tables[count]
        return Corpora(training=tables[:count], validation=validation)


def find_corpora(data: DataRequest) -> Corpora:
    """Finds all corpora of a request.

    Raises:
        DataError: a source does not exist or has nothing readable in it.
    """
    names = (*data.sources, *((data.validation,) if data.validation is not None else ()))
    found: list[Corpus] = []
    errors: list[str] = []
    for name in names:
        try:
            found.append(find_corpus(name))
        except DataError as error:
            errors.append(str(error))
    raise_data_errors(errors)
    count = len(data.sources)
    return Corpora(
        training=tuple(found[:count]), validation=found[count] if len(names) > count else None
    )


def corpus_bytes(data: DataRequest) -> int:
    """Bytes of the files to train on, as far as the request takes them; none of them is read.

    Raises:
        DataError: a source does not exist or has nothing readable in it.
    """
    most = float("inf") if data.limit_bytes is None else data.limit_bytes
    sizes = (
        sum(file.path.stat().st_size for file in corpus.files)
        for corpus in find_corpora(data).training
    )
    return round(sum(min(size, most) for size in sizes))


def find_corpus(source: str) -> Corpus:
    """Finds the corpus of a source.

    Args:
        source: `stdlib`, a folder, a file of text, JSON or Parquet, a folder saved by Hugging Face
            `datasets`, or `hf:name[@config][:split]`.

    Raises:
        DataError: the source does not exist or has nothing readable in it.
    """
    if source == STDLIB:
        return _standard_library()
    if source.startswith(HUGGING_FACE):
        return _hugging_face(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(source, path)
    if path.is_file():
        return Corpus(source=source, files=(_lone_file(source, path),))
    if path.exists():
        raise DataError(f"`{source}` is a pipe or device; name a file or a folder")
    raise DataError(f"no file or folder `{source}`{_suggestion(source, path)}")


def _lone_file(source: str, path: Path) -> SourceFile:
    """The file that a source names."""
    layout, suffix = find_json_layout(path), plain_suffix(path)
    if layout is not None and layout.form == "object" and suffix == ".json":
        raise DataError(
            f"`{source}` holds one object of JSON and no rows; write an object on each line or an "
            "array of objects, or name the file `.txt` to train on it as it stands"
        )
    if suffix not in TABLE_SUFFIXES and not looks_like_text(path):
        raise DataError(
            f"`{source}` does not look like text; Windlass reads UTF-8 text, JSON lines, arrays of "
            f"JSON and Parquet, also compressed ({', '.join(sorted(COMPRESSED_SUFFIXES))}), and "
            "folders of them"
        )
    # A table has rows, and a text is split into chunks, so that a part can be held out.
    return SourceFile(
        name=path.name,
        path=path,
        single_document=suffix in TABLE_SUFFIXES,
        json=layout,
        names_rows=suffix == ".json",
    )


def _suggestion(source: str, path: Path) -> str:
    """A suggestion among the entries of the nearest folder that exists."""
    if suggestion := did_you_mean(source, [STDLIB]):
        return suggestion
    if not path.parent.is_dir():
        return f"; there is no folder `{path.parent}` either"
    suggestion = did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
    if suggestion and path.parent != Path():
        return suggestion.replace("`", f"`{path.parent}/", 1)
    return suggestion


def _standard_library() -> Corpus:
    """The `.py` files of this Python, without tests, character tables and installed packages."""
    root = Path(sysconfig.get_paths()[STDLIB])
    files = tuple(
        SourceFile(name=name, path=path, single_document=True)
        for name, path in _walk(root, _SKIPPED_FOLDERS | _TEST_FOLDERS | _CHARACTER_TABLES)
        if path.suffix == ".py" and not name.startswith(_MACHINE_SPECIFIC)
    )
    if not files:
        raise DataError(
            f"this Python has no source files in `{root}`; name a folder or file of text as "
            "`data.source`"
        )
    return Corpus(source=STDLIB, files=files, skip_undecodable=True)


def _folder(source: str, root: Path) -> Corpus:
    """All text files and tables below a folder, or the tables of a saved dataset."""
    if (root / _SAVED_SPLIT).is_file() or (root / _SAVED_DICT).is_file():
        return _saved_dataset(source, root)
    readable: list[tuple[str, Path]] = []
    left_out: list[str] = []
    for name, path in _walk(root, _SKIPPED_FOLDERS):
        # Pipes and devices may never end.
        if path.is_file() and (plain_suffix(path) in TABLE_SUFFIXES or looks_like_text(path)):
            readable.append((name, path))
        elif not path.is_file() or path.stat().st_size:
            left_out.append(name)
    if not readable:
        raise DataError(f"no text in `{source}`: no file below it is UTF-8 text, JSON or Parquet")
    # A lone file is split into chunks; otherwise nothing could be held out.
    several = len(readable) > 1
    files = tuple(_file_of_folder(name, path, several) for name, path in readable)
    return Corpus(source=source, files=files, left_out=tuple(left_out))


def _file_of_folder(name: str, path: Path, several: bool) -> SourceFile:
    layout = find_json_layout(path)
    is_lines = layout is not None and layout.form == "lines" and plain_suffix(path) == ".json"
    return SourceFile(
        name=name, path=path, single_document=several, json=layout, names_rows=is_lines
    )


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[tuple[str, Path]]:
    """Files below `root` with their relative names, ordered by name; hidden ones are skipped."""
    files: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        path = Path(folder)
        prefix = "" if path == root else f"{path.relative_to(root).as_posix()}/"
        files += [(f"{prefix}{name}", path / name) for name in names if name[0] != "."]
    return iter(sorted(files))


def _saved_dataset(source: str, root: Path) -> Corpus:
    """The Arrow files of a folder written by `save_to_disk`; a `DatasetDict` gives its `train`."""
    if (root / _SAVED_DICT).is_file():
        splits = sorted(path.parent.name for path in root.glob(f"*/{_SAVED_SPLIT}"))
        if "train" not in splits:
            raise DataError(
                f"`{source}` has no split `train` but {_list(splits)}; name one of them, such "
                f"as `{root / (splits[0] if splits else 'train')}`"
            )
        root = root / "train"
    try:
        state = json.loads((root / _SAVED_SPLIT).read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"`{root / _SAVED_SPLIT}` is damaged: {error}") from None
    return _arrow_corpus(source, [root / name for name in names])


def _hugging_face(source: str) -> Corpus:
    """The Arrow files of a Hugging Face dataset, downloaded or found in its cache."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"`{source}` needs the package `datasets`; install `windlass[datasets]`"
        ) from None
    name, split, config = _hugging_face_name(source)
    try:
        table = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"`{source}` cannot be loaded: {reason}") from None
    corpus = _arrow_corpus(source, [Path(entry["filename"]) for entry in table.cache_files])
    rows = sum(arrow_row_count(file.path) for file in corpus.files)
    if rows != len(table):
        raise DataError(
            f"`{source}` is {len(table)} of the {rows} rows of a split; name the whole split and "
            "use `data.limit_bytes` to take less"
        )
    return corpus


def _hugging_face_name(source: str) -> tuple[str, str, str | None]:
    """Name, split and configuration of `hf:name[@config][:split]`."""
    name, colon, split = source.removeprefix(HUGGING_FACE).partition(":")
    if not colon:
        split = "train"
    name, _, config = name.partition("@")
    if not name or not split:
        raise DataError(f"`{source}` names no dataset; write it as `hf:name[@config][:split]`")
    return name, split, config or None


def _arrow_corpus(source: str, paths: list[Path]) -> Corpus:
    if not paths:
        raise DataError(f"`{source}` has no data files; it may be empty")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"data files of `{source}` are missing: {_list(missing)}; save it again")
    files = tuple(SourceFile(name=path.name, path=path, single_document=True) for path in paths)
    return Corpus(source=source, files=files)


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"
