"""Opens files of text, compressed ones as what they hold."""

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer

from windlass.errors import DataError

COMPRESSED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".lzma", ".zst"})
"""Endings of the names of files that are read as what they hold."""
_BLOCK_BYTES = 2**16
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
    """The content of a file, uncompressed while it is read, in UTF-8.

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
            yield _as_utf8(io.BufferedReader(stream))
    except _FAULTS as error:
        raise OSError(f"it is damaged: {error}") from None


def _as_utf8(stream: io.BufferedReader) -> BinaryIO:
    """The same text in UTF-8, if its mark says that it is in another encoding."""
    head = stream.peek(len(codecs.BOM_UTF32_LE))
    # The mark of UTF-32 begins with that of UTF-16.
    marks = (("utf-32", codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
             ("utf-16", codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # fmt: skip
    encoding = next((name for name, *marks in marks if head.startswith(tuple(marks))), None)
    return stream if encoding is None else io.BufferedReader(_Recoded(stream, encoding))


class _Recoded(io.RawIOBase):
    """Text of another encoding as UTF-8.

    Args:
        stream: the text, which begins with a mark.
        encoding: `utf-16` or `utf-32`.
    """

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream, self._encoding = stream, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._waiting = b""

    def readable(self) -> bool:
        """Returns True, as `io.BufferedReader` asks before it reads."""
        return True

    def readinto(self, buffer: "Buffer") -> int:
        """Fills a buffer; 0 at the end.

        Raises:
            OSError: a part of the file is in another encoding than its mark says.
        """
        view = memoryview(buffer).cast("B")
        while not self._waiting:
            content = self._stream.read(_BLOCK_BYTES)
            try:
                self._waiting = self._decoder.decode(content, final=not content).encode()
            except UnicodeError as error:
                name = self._encoding.upper()
                raise OSError(f"its mark says {name}, and a part of it is none: {error}") from None
            if not content:
                break
        size = min(len(view), len(self._waiting))
        view[:size], self._waiting = self._waiting[:size], self._waiting[size:]
        return size


def _open_zstandard(path: Path, mode: str) -> BinaryIO:
    """The content of a file of Zstandard.

    pyarrow says where one ends early; the reader of the package `zstandard` just ends there.
    """
    del mode
    stream = arrow_package(path).input_stream(str(path), compression="zstd")
    return cast(BinaryIO, io.BufferedReader(stream))


def arrow_package(path: Path) -> ModuleType:
    """The package pyarrow.

    Raises:
        DataError: it is missing.
    """
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise DataError(
            f"`{path}` needs the package `pyarrow`; install `windlass[parquet]`"
        ) from None
