"""A layer's home beyond the near tier: its state is read, updated and written back in pieces.

No more than the staging memory is held for it, whatever the size of the layer. While one piece is
updated the next is read and the one before is written.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from windlass.program.values import STAGING_BYTES
from windlass.runtime.directfile import DirectFile, aligned, page_memory
from windlass.runtime.lane import Lane, Moved
from windlass.runtime.statefile import (
    KINDS,
    Region,
    StateLayout,
    layer_files,
    region,
    state_layout,
    write_tail,
)
from windlass.runtime.tensorfile import read_tensors

_SETS = 3
"""Pieces under way: one is read, one updated, one written."""
_PIECE_BYTES = STAGING_BYTES // (4 * _SETS + 1)
"""Of each of masters, two moments and gradient; and once more to turn gradients into float32."""
_PIECE = _PIECE_BYTES // 4


class Apply(Protocol):
    """One step of the optimizer for a piece of one weight."""

    def __call__(
        self,
        master: Tensor,
        moments: tuple[Tensor, Tensor],
        gradient: Tensor,
        *,
        updates: int,
        decays: bool,
    ) -> None:
        """Changes master and moments in place; `updates` came before."""


class Staging:
    """The memory that state passes through, for all layers in turn."""

    def __init__(self) -> None:
        self.sets = [[page_memory(_PIECE_BYTES) for _ in range(4)] for _ in range(_SETS)]
        self.converted = page_memory(_PIECE_BYTES).view(torch.float32)


class _Piece(NamedTuple):
    """A part of one weight."""

    weight: int
    first: int
    """Element."""
    elements: int


class LayerHome:
    """The files of one layer.

    Args:
        folder: of all layers' files.
        index: of the layer.
        weights: names and shapes of what it owns.
        buffers: that belong to a checkpoint.
        working: what the layer computes in.
        gradients: what gradients are summed in.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        weights: Mapping[str, tuple[int, ...]],
        buffers: Sequence[tuple[str, Tensor]],
        *,
        working: torch.dtype,
        gradients: torch.dtype,
    ) -> None:
        self._state, self._working, self._gradients = layer_files(folder, index)
        self._buffers = buffers
        self._layout: StateLayout = state_layout(weights, buffers)
        self._decays = tuple(len(shape) >= 2 for shape in weights.values())
        self._updates = [0] * len(weights)
        self._apart = working != torch.float32
        self._shared = False
        """A checkpoint has the state's file under another name: it must not change."""
        self.working: Region = region(weights, working)
        self.gradients: Region = region(weights, gradients)

    def create(self, state: Sequence[Sequence[Tensor] | None], staging: Staging) -> None:
        """Makes the files.

        Args:
            state: masters, first and second moments of each weight; None for zeros.
            staging: passed through.

        Raises:
            OSError: the disk is full, or the folder does not take files.
        """
        for path in (self._state, self._working, self._gradients):
            path.unlink(missing_ok=True)
        with DirectFile(self._state, write=True) as file:
            file.resize(self._layout.nbytes)
            for which, tensors in enumerate(state):
                for piece in self._pieces():
                    memory = staging.sets[0][0][: aligned(4 * piece.elements)]
                    memory.zero_()
                    if tensors is not None:
                        into = memory[: 4 * piece.elements].view(torch.float32)
                        into.copy_(_part(tensors[piece.weight].detach(), piece))
                    file.write(memory, self._at(which, piece))
            write_tail(file, self._layout, self._updates, [b for _, b in self._buffers])
        self._make_working(staging)
        self._make_room()

    def adopt(self, file: Path, updates: int, staging: Staging) -> None:
        """Takes a checkpoint's file for its state; copies it only if it is laid out otherwise.

        Args:
            file: whole.
            updates: that its weights have had.
            staging: passed through.

        Raises:
            CheckpointError: it is of another model.
        """
        self._updates = [updates] * len(self._updates)
        if not self._laid_out_so(file):
            parts = self._layout.region.slices
            state = [[torch.empty(part.shape) for part in parts] for _ in KINDS]
            for kind, tensors in zip(KINDS, state, strict=True):
                names = (f"{kind}/{part.name}" for part in parts)
                read_tensors(file, dict(zip(names, tensors, strict=True)))
            self.create(state, staging)
            return
        for path in (self._state, self._working, self._gradients):
            path.unlink(missing_ok=True)
        os.link(file, self._state)
        self._shared = True
        self._make_working(staging)
        self._make_room()

    def _laid_out_so(self, file: Path) -> bool:
        with file.open("rb") as content:
            return content.read(len(self._layout.header)) == self._layout.header

    def link(self, to: Path) -> None:
        """Gives the state's file, as it is now, a second name that keeps its content."""
        if not self._shared:
            with DirectFile(self._state, write=True) as file:
                write_tail(file, self._layout, self._updates, [b for _, b in self._buffers])
                file.sync()
        os.link(self._state, to)
        self._shared = True

    def fetch(self, memory: Tensor, moved: Moved) -> None:
        """Reads what the layer computes with into `UInt8[working.nbytes]`."""
        path = self._working if self._apart else self._state
        with DirectFile(path, write=False) as file:
            file.read(memory, 0 if self._apart else self._layout.offset(0))
        moved.read_bytes += memory.numel()

    def store(self, gradients: Sequence[Tensor | None], staging: Staging, moved: Moved) -> None:
        """Writes the summed gradients of all weights that have one."""
        size = self.gradients.dtype.itemsize
        bounce = staging.sets[0][3]
        with DirectFile(self._gradients, write=True) as file:
            for piece in self._pieces():
                gradient = gradients[piece.weight]
                if gradient is None:
                    continue
                memory, at = self._gradient_at(bounce, piece)
                into = memory[: size * piece.elements].view(self.gradients.dtype)
                into.copy_(_part(gradient, piece))
                file.write(memory, at)
                moved.written_bytes += memory.numel()

    def update(
        self,
        apply: Apply,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        has: Sequence[bool],
        *,
        memory: Tensor | None,
        staging: Staging,
        lane: Lane,
        moved: Moved,
    ) -> None:
        """One step of the optimizer for the whole layer.

        Args:
            apply: the optimizer.
            weights: near copies of what the layer computes with; they are made anew.
            gradients: of each weight; None: they were stored.
            has: which weights have a gradient.
            memory: that `weights` lie in, written to the layer's home; None if they stay near.
            staging: passed through.
            lane: its reader and writer.
            moved: counts the bytes.
        """
        with ExitStack() as stack:
            source = stack.enter_context(DirectFile(self._state, write=True))
            into = stack.enter_context(self._beside()) if self._shared else source
            stored = None
            if gradients is None and any(has):
                stored = stack.enter_context(DirectFile(self._gradients, write=False))

            def read(sets: list[Tensor], piece: _Piece) -> None:
                for which in range(len(KINDS)):
                    memory = sets[which][: aligned(4 * piece.elements)]
                    source.read(memory, self._at(which, piece))
                    moved.read_bytes += memory.numel()
                if stored is not None and has[piece.weight]:
                    memory, at = self._gradient_at(sets[-1], piece)
                    stored.read(memory, at)
                    moved.read_bytes += memory.numel()

            def work(sets: list[Tensor], piece: _Piece) -> None:
                self._piece(sets, piece, apply, weights, gradients, has, staging)

            def write(sets: list[Tensor], piece: _Piece) -> None:
                for which in range(len(KINDS)):
                    memory = sets[which][: aligned(4 * piece.elements)]
                    into.write(memory, self._at(which, piece))
                    moved.written_bytes += memory.numel()

            lane.pass_through(list(self._pieces()), staging.sets, read, work, write)
            self._updates = [n + did for n, did in zip(self._updates, has, strict=True)]
            if self._shared:
                write_tail(into, self._layout, self._updates, [b for _, b in self._buffers])
                into.path.rename(self._state)
                self._shared = False
        if memory is not None and self._apart:
            with DirectFile(self._working, write=True) as file:
                file.write(memory, 0)
            moved.written_bytes += memory.numel()

    def _beside(self) -> DirectFile:
        """A new file for the state, while a checkpoint keeps the old one."""
        path = self._state.with_suffix(".next")
        path.unlink(missing_ok=True)
        file = DirectFile(path, write=True)
        file.resize(self._layout.nbytes)
        return file

    def _gradient_at(self, memory: Tensor, piece: _Piece) -> tuple[Tensor, int]:
        """What a stored piece of gradient takes of memory, and where it lies in the file."""
        size = self.gradients.dtype.itemsize
        at = self.gradients.slices[piece.weight].offset + size * piece.first
        return memory[: aligned(size * piece.elements)], at

    def _piece(
        self,
        at: list[Tensor],
        piece: _Piece,
        apply: Apply,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        has: Sequence[bool],
        staging: Staging,
    ) -> None:
        """Updates one piece that has been read."""
        index, count = piece.weight, piece.elements
        master, one, two = (memory[: 4 * count].view(torch.float32) for memory in at[:3])
        if has[index]:
            near = None if gradients is None else gradients[index]
            dtype = self.gradients.dtype
            gradient = (
                at[3][: dtype.itemsize * count].view(dtype) if near is None else _part(near, piece)
            )
            if gradient.dtype != torch.float32:
                gradient = staging.converted[:count].copy_(gradient)
            apply(
                master, (one, two), gradient,
                updates=self._updates[index], decays=self._decays[index],
            )  # fmt: skip
        _part(weights[index].detach(), piece).copy_(master)

    def _pieces(self) -> Iterator[_Piece]:
        for index, part in enumerate(self._layout.region.slices):
            elements = part.nbytes // 4
            for first in range(0, elements, _PIECE):
                yield _Piece(index, first, min(_PIECE, elements - first))

    def _at(self, which: int, piece: _Piece) -> int:
        """Where a piece of masters (0) or moments (1, 2) lies in the state's file."""
        part = self._layout.region.slices[piece.weight]
        return self._layout.offset(which) + part.offset + 4 * piece.first

    def _make_working(self, staging: Staging) -> None:
        """Makes the working weights from the masters."""
        if not self._apart:
            return
        with (
            DirectFile(self._state, write=False) as state,
            DirectFile(self._working, write=True) as file,
        ):
            file.resize(self.working.nbytes)
            for piece in self._pieces():
                memory, into = staging.sets[0][0], staging.sets[0][1]
                state.read(memory[: aligned(4 * piece.elements)], self._at(0, piece))
                nbytes = self.working.dtype.itemsize * piece.elements
                master = memory[: 4 * piece.elements].view(torch.float32)
                into[:nbytes].view(self.working.dtype).copy_(master)
                into[nbytes : aligned(nbytes)].zero_()
                part = self.working.slices[piece.weight]
                at = part.offset + self.working.dtype.itemsize * piece.first
                file.write(into[: aligned(nbytes)], at)

    def _make_room(self) -> None:
        """Takes the disk's room for gradients before it is needed."""
        with DirectFile(self._gradients, write=True) as file:
            file.resize(self.gradients.nbytes)


def _part(tensor: Tensor, piece: _Piece) -> Tensor:
    """The piece of a whole weight or gradient."""
    return tensor.reshape(-1)[piece.first : piece.first + piece.elements]
