"""Where weights stand in files: ranges of bytes that can be read without copying the files."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from windlass.document import Document
from windlass.errors import ModelError, shorten
from windlass.models.huggingface.weight_files import TYPES, StoredTensor

PLACES_SUFFIX = ".places.json"
"""End of the name of a checkpoint's file that says where weights stand which it does not hold."""
_SECOND = 10**9
"""In nanoseconds."""


class ByteRange(Document):
    """Consecutive bytes of a file."""

    file: Path
    offset: int
    """First byte in the file."""
    nbytes: int


class WeightPlace(Document):
    """The files' bytes that are the values of one weight, one range behind the other."""

    dtype: str
    """In the words of safetensors, such as `BF16`."""
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the values."""
        return TYPES[self.dtype]

    def flat_part(self, first: int, shape: tuple[int, ...]) -> "WeightPlace":
        """The place of a part of the flattened weight.

        Args:
            first: its first element.
        """
        size = self.torch_dtype.itemsize
        begin, end = first * size, (first + prod(shape)) * size
        parts: list[ByteRange] = []
        at = 0
        for part in self.ranges:
            low, high = max(begin - at, 0), min(end - at, part.nbytes)
            if low < high:
                inner = {"offset": part.offset + low, "nbytes": high - low}
                parts.append(part.model_copy(update=inner))
            at += part.nbytes
        return WeightPlace(dtype=self.dtype, shape=shape, ranges=tuple(parts))

    def read(self) -> Tensor:
        """The values.

        Raises:
            ModelError: a file cannot be read, or ends too early.
        """
        values = torch.empty(self.shape, dtype=self.torch_dtype)
        memory: memoryview = values.view(-1).view(torch.uint8).numpy().data
        start = 0
        for part in self.ranges:
            _read_range(part, memory[start : start + part.nbytes])
            start += part.nbytes
        return values


class FileStamp(Document):
    """What tells that a file was not changed, without reading it."""

    nbytes: int
    modified_ns: int
    """Time of its last change, in nanoseconds since 1970."""


class WeightPlaces(Document):
    """Weights that are read where they stand, in files that must not change meanwhile."""

    files: Mapping[str, FileStamp]
    """By path."""
    weights: Mapping[str, WeightPlace]
    """By full name."""

    @classmethod
    def of(cls, weights: Mapping[str, WeightPlace]) -> "WeightPlaces":
        """The places of some weights, in files as they are now.

        Raises:
            ModelError: a file is gone.
        """
        files = {str(part.file) for place in weights.values() for part in place.ranges}
        return cls(files={file: _stamp(file) for file in sorted(files)}, weights=weights)

    def changes(self) -> Iterator[str]:
        """What has become of the files since, a sentence for each that is no longer the same."""
        for file, before in self.files.items():
            try:
                now = _stamp(file)
            except ModelError as error:
                yield f"{error}; put it back"
                continue
            if now.nbytes != before.nbytes:
                yield (
                    f"`{shorten(file)}` has {now.nbytes} bytes, and had {before.nbytes} when its "
                    "weights were first read; put the old file back"
                )
            elif now != before:
                yield (
                    f"`{shorten(file)}` was changed since its weights were first read; put the old "
                    "file back or, where it only was copied, its time: `touch -d "
                    f"@{before.modified_ns // _SECOND}.{before.modified_ns % _SECOND:09d} {file}`"
                )


def place_of(stored: StoredTensor) -> WeightPlace:
    """The place of a tensor that is a whole weight."""
    part = ByteRange(file=stored.file.absolute(), offset=stored.offset, nbytes=stored.nbytes)
    return WeightPlace(dtype=stored.dtype, shape=stored.shape, ranges=(part,))


def _stamp(file: str) -> FileStamp:
    try:
        status = Path(file).stat()
    except OSError:
        raise ModelError(
            f"`{shorten(file)}`, whose weights are read where they stand, is gone"
        ) from None
    return FileStamp(nbytes=status.st_size, modified_ns=status.st_mtime_ns)


def _read_range(part: ByteRange, memory: memoryview) -> None:
    """Fills memory of the same size."""
    done = 0
    try:
        with part.file.open("rb", buffering=0) as file:
            file.seek(part.offset)
            while done < part.nbytes:
                count = file.readinto(memory[done:])
                if not count:
                    raise ModelError(f"`{part.file}` ends before byte {part.offset + part.nbytes}")
                done += count
    except OSError as error:
        raise ModelError(f"`{part.file}` cannot be read: {error}") from None
