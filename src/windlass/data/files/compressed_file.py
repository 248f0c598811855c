"""Opens files of text, compressed ones as what they hold."""

import bz2
import gzip
import importlib
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
    suffix, faults = path.suffix.lower(), _FAULTS
    zstandard = _zstandard(path) if suffix == ".zst" else None
    openers: dict[str, Callable[[Path, str], Any]] = {
        ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open,
    }  # fmt: skip
    if zstandard is not None:
        openers[".zst"], faults = zstandard.open, (*faults, zstandard.ZstdError)
    try:
        with openers.get(suffix, open)(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    except faults as error:
        raise OSError(f"it is damaged: {error}") from None


def _zstandard(path: Path) -> ModuleType:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise DataError(
            f"`{path}` needs the package `zstandard`; install it, or compress the file by gzip"
        ) from None
