"""Opens files of text, compressed ones as what they hold."""

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

from windlass.errors import DataError

COMPRESSED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".lzma", ".zst"})
"""Endings of the names of files that are read as what they hold."""
_FAULTS: tuple[type[Exception], ...] = (
    EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile,
)  # fmt: skip
"""What the libraries raise for a file that ends early, or is none of theirs."""


def plain_suffix(path: Path) -> str:
    """The suffix of what a file holds: `.jsonl` of `a.jsonl` and of `a.JSONL.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix


@contextmanager
def open_text_file(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, uncompressed while it is read.

    Raises:
        DataError: the package is missing that uncompresses it.
        OSError: it cannot be read, or is damaged.
    """
    openers: dict[str, Callable[[Path, str], Any]] = {
        ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open,
        ".zst": _open_zstandard,
    }  # fmt: skip
    try:
        with openers.get(path.suffix.lower(), open)(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    except _FAULTS as error:
        raise OSError(f"it is damaged: {error}") from None


def _open_zstandard(path: Path, mode: str) -> BinaryIO:
    """The content of a file of Zstandard.

    pyarrow says where one ends early; the reader of the package `zstandard` just ends there.
    """
    del mode
    stream = arrow_package(path).input_stream(str(path), compression="zstd")
    return cast(BinaryIO, io.BufferedReader(stream))


def arrow_package(path: Path) -> ModuleType:
    """The package pyarrow.

    Args:
        path: the file that needs it.

    Raises:
        DataError: it is missing.
    """
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise DataError(
            f"`{path}` needs the package `pyarrow`; install `windlass[parquet]`"
        ) from None
