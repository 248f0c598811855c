"""Safetensors files, written directly from memory.

The library's own writer copies every tensor first, which would double a layer's memory.
Source of the format: https://github.com/huggingface/safetensors, section "Format".

Copies run in the stream that is current, which is the saver's own, so that the stream that trains
does not wait for them. Two blocks are all the memory that a save takes: while one is written, the
other is filled. No GPU has run this yet.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.atomic_files import hash_file, storage_errors
from windlass.document import Document
from windlass.torch_ext import Device, Event, PinnedMemory

BLOCK_BYTES = 32 * 2**20
"""Bytes of one block: long enough for the link's full rate, and for several system calls."""


class HostStaging:
    """Two blocks of pinned host memory, allocated when first needed and freed by `close`."""

    def __init__(self, device: Device, block_bytes: int = BLOCK_BYTES) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._memory: PinnedMemory | None = None

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor in order; each block is valid until the next one is asked for.

        Nobody may change the tensor meanwhile.
        """
        if self._memory is None:
            self._memory = PinnedMemory(2 * self._block_bytes, self._device)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        halves = self._memory.buffer[: 2 * self._block_bytes].split(self._block_bytes)
        filled: tuple[Tensor, Event] | None = None
        try:
            for index, part in enumerate(flat.split(self._block_bytes)):
                previous, filled = filled, self._fill(halves[index % 2], part)
                if previous is not None:
                    yield _content(*previous)
            if filled is not None:
                yield _content(*filled)
        finally:
            # A writer that fails asks for no more blocks, and then the memory is freed.
            if filled is not None:
                filled[1].synchronize()

    def _fill(self, half: Tensor, part: Tensor) -> tuple[Tensor, Event]:
        """Starts to copy a part of a tensor; returns where to, and the event that follows."""
        block = half[: part.numel()]
        block.copy_(part, non_blocking=True)
        copied = self._device.new_event()
        copied.record(self._device.current_stream())
        return block, copied

    def close(self) -> None:
        """Frees the memory; no copy may be running."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _content(block: Tensor, copied: Event) -> memoryview:
    """A block's bytes, once they are there."""
    copied.synchronize()
    return block.numpy().data


def host_staging(device: Device) -> HostStaging | None:
    """What saves of a device's tensors pass through; None where files are written from memory."""
    return HostStaging(device) if device.is_asynchronous else None


_BLOCK_BYTES = 4 * 2**20
_ALIGNMENT = 8
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class FileChecksum(Document):
    """Size and SHA-256 of a complete file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileChecksum":
        """The checksum of a file, which is read for it."""
        return cls(bytes=path.stat().st_size, sha256=hash_file(path))


PendingChecksum = Callable[[], FileChecksum]
"""Returns a file's checksum; it may have to read the file first."""


class SavedFile(NamedTuple):
    """A checkpoint file that holds a layer, or one rank's shard of it."""

    path: Path
    checksum: PendingChecksum


class TensorPart(NamedTuple):
    """A rectangle of a full tensor."""

    offsets: tuple[int, ...]
    """Its first index of each dimension."""
    values: Tensor
    """Its memory."""


def write_tensors(
    path: Path,
    tensors: Iterable[tuple[str, Tensor]],
    staging: HostStaging | None = None,
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> FileChecksum:
    """Writes a file, flushes it to the disk, and returns its checksum.

    Args:
        tensors: names and tensors; nobody may change the tensors meanwhile.
        staging: what an accelerator's tensors pass through; None if they are in host memory.
        offsets: where each tensor begins in the full one that it is a rectangle of, which
            `torch.distributed.checkpoint` reads; None if they are full.

    Raises:
        OSError: the file cannot be written.
    """
    named = dict(tensors)
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for content in _contents(named, staging, offsets):
            for start in range(0, len(content), _BLOCK_BYTES):
                block = content[start : start + _BLOCK_BYTES]
                file.write(block)
                digest.update(block)
            size += len(content)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(bytes=size, sha256=digest.hexdigest())


def _contents(
    named: Mapping[str, Tensor],
    staging: HostStaging | None,
    offsets: Mapping[str, Sequence[int]] | None,
) -> Iterator[memoryview]:
    """The parts of a file, in order; each is valid until the next one is asked for."""
    yield memoryview(_header(named, offsets))
    for tensor in named.values():
        if staging is None:
            yield tensor_bytes(tensor)
        else:
            yield from staging.blocks(tensor)


def stream_tensors(path: Path, shapes: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Writes a file from tensors that are made one after another; replaces it when it is complete.

    Args:
        tensors: the tensors, in the order of `shapes`; they get the types that `shapes` have.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(_header(shapes))
                for shape, tensor in zip(shapes.values(), tensors, strict=True):
                    file.write(tensor_bytes(tensor.to(shape.dtype)))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _header(
    named: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> bytes:
    about = {"format": "pt"}
    if offsets is not None:
        places = {name: {"saved_offsets": list(each)} for name, each in offsets.items()}
        about |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    entries: dict[str, object] = {"__metadata__": about}
    offset = 0
    for name, tensor in named.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor as bytes, copied only if not contiguous or on another device."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data
