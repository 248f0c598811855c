"""A layer's home beyond the near tier: its state is read, updated and written back in pieces.

No more than the staging memory is held for it, whatever the size of the layer. While one piece is
updated the next is read and the one before is written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.program.memory.values import STAGING_BYTES
from windlass.runtime.adamw import ParameterPart
from windlass.runtime.checkpoint.convert_moments import read_moments
from windlass.runtime.checkpoint.safetensors_io import read_tensors
from windlass.runtime.offload.backing_store import StoreHandle, BackingStore, BackingStores
from windlass.runtime.checkpoint.safetensors_io import PendingChecksum
from windlass.runtime.offload.direct_io import round_up_to_page, page_aligned_buffer
from windlass.runtime.offload.state_layout import (
    TensorRegion,
    StateLayout,
    region,
    state_layout,
    write_tail,
)
from windlass.runtime.offload.transfer_queue import TransferQueue, TransferStats
from windlass.schema.plan import DEVICE_TIER, MomentFormat, Offload
from windlass.torch_ext.quantized_moments import MomentCodec, StoredMoment

_SETS = 3
"""Pieces under way: one is read, one updated, one written."""
_PIECE_BYTES = STAGING_BYTES // (4 * _SETS + 1)
"""Of each of masters, two moments and gradient; and once more to turn gradients into float32."""
_PIECE = _PIECE_BYTES // 4
"""Elements, a multiple of the codec's parts: so no block straddles two pieces, and all that a piece
has begins at a page."""
_SCALES_AT = _PIECE_BYTES // 2
"""Where scales lie in the memory of their codes, which take a quarter."""
_MEMORY = {"weight": (0, 0), "moment1": (1, 0), "moment2": (2, 0),
           "scale1": (1, _SCALES_AT), "scale2": (2, _SCALES_AT)}  # fmt: skip
"""Which memory of a set takes what, and where in it."""


ApplyUpdate = Callable[[ParameterPart], None]
"""Takes one optimizer step for a part of one parameter, in place."""


class StagingBuffers:
    """The memory that state passes through, for all layers in turn.

    Args:
        device: that updates, and whose near tier it is of.
    """

    def __init__(self, device: torch.device) -> None:
        self.sets = [[page_aligned_buffer(_PIECE_BYTES, device) for _ in range(4)] for _ in range(_SETS)]
        self.converted = page_aligned_buffer(_PIECE_BYTES, device).view(torch.float32)


class _Piece(NamedTuple):
    """A part of one weight."""

    weight: int
    first: int
    """Element."""
    elements: int


class OffloadedLayerState:
    """Where one layer lives.

        layer-0003.safetensors   masters, moments and counts of updates: a checkpoint's file as is
        layer-0003.working       what the layer computes with, where that is not the masters
        layer-0003.gradients     the summed gradients that wait for their update, where the layer
                                 has such and they may not lie in the working weights' place

    Args:
        shelves: give it its places.
        index: of the layer.
        home: the tier of each class.
        weights: names and shapes of what it owns.
        buffers: that belong to a checkpoint.
        working: what the layer computes in.
        gradients: what gradients are summed in; None if none waits here for its update.
        moments: how they are kept.
        shares: whether gradients may lie in the working weights' place.
        decays: whether each weight is pulled towards zero; None: those of 2 dimensions and more.
    """

    def __init__(
        self,
        shelves: BackingStores,
        index: int,
        home: Offload,
        weights: Mapping[str, tuple[int, ...]],
        buffers: Sequence[tuple[str, Tensor]],
        *,
        working: torch.dtype,
        gradients: torch.dtype | None,
        moments: MomentFormat,
        shares: bool,
        decays: Sequence[bool] | None = None,
    ) -> None:
        self._buffers = buffers
        self._moments: MomentFormat = moments
        self._layout: StateLayout = state_layout(weights, buffers, moments)
        self._decays = decays or tuple(len(shape) >= 2 for shape in weights.values())
        self._updates = [0] * len(weights)
        self.working: TensorRegion = region(weights, working)
        self.gradients: TensorRegion = region(weights, gradients or torch.float32)
        name = f"layer-{index:04d}"
        self._state: BackingStore = shelves.shelf(
            home.optimizer, f"{name}.safetensors", self._layout.nbytes
        )
        self._working: BackingStore | None = None
        """None where layers compute with the masters."""
        self._gradients: BackingStore | None = None
        """None where no gradient waits."""
        shared = shares and gradients is not None
        if working != torch.float32:
            nbytes = max(self.working.nbytes, self.gradients.nbytes if shared else 0)
            tier = home.optimizer if home.parameters == DEVICE_TIER else home.parameters
            self._working = shelves.shelf(tier, f"{name}.working", nbytes)
        if shared:
            self._gradients = self._working
        elif gradients is not None:
            self._gradients = shelves.shelf(
                home.gradients, f"{name}.gradients", self.gradients.nbytes
            )

    def create(
        self,
        masters: Sequence[Tensor],
        staging: StagingBuffers,
        moments: Sequence[tuple[StoredMoment, StoredMoment]] | None = None,
        *,
        updates: int = 0,
    ) -> None:
        """Takes the room, and fills it.

        Args:
            masters: of each weight.
            staging: passed through.
            moments: of each weight, as they are kept; None for zeros.
            updates: that the weights have had.

        Raises:
            OSError: the disk is full, or the folder does not take files.
        """
        self._updates = [updates] * len(self._updates)
        self._state.make()
        sets = staging.sets[0]
        with self._state.opened(write=True) as file:
            for piece in self._pieces():
                for memory, _ in self._spots(sets, piece):
                    memory.zero_()
                master, kept = self._views(sets, piece)
                master.copy_(_part(masters[piece.weight].detach(), piece))
                for into, each in zip(kept, moments[piece.weight] if moments else (), strict=False):
                    part = each.narrow(piece.first, piece.elements)
                    into.values.copy_(part.values)
                    if into.scales is not None and part.scales is not None:
                        into.scales.copy_(part.scales)
                for memory, at in self._spots(sets, piece):
                    file.write(memory, at)
            write_tail(file, self._layout, self._updates, [b for _, b in self._buffers])
        self._make_rest(staging)

    def adopt(self, file: Path, updates: int, staging: StagingBuffers, *, seed: int) -> None:
        """Takes a checkpoint's file for its state, as it is unless it is laid out otherwise.

        Moments in another format are decoded, and encoded anew.

        Args:
            file: whole.
            updates: that its weights have had.
            staging: passed through.
            seed: of the run that wrote it.

        Raises:
            CheckpointError: it is of another model.
        """
        self._updates = [updates] * len(self._updates)
        if self._laid_out_so(file):
            self._state.adopt(file)
            self._make_rest(staging)
            return
        parts = self._layout.masters.slices
        masters = {f"weight/{part.name}": torch.empty(part.shape) for part in parts}
        read_tensors(file, masters)
        codec = MomentCodec(torch.device("cpu"))
        moments = [
            read_moments(file, part.name, part.shape, self._moments, codec, seed=seed, step=updates)
            for part in parts
        ]
        self.create(list(masters.values()), staging, moments, updates=updates)

    def _laid_out_so(self, file: Path) -> bool:
        with file.open("rb") as content:
            return content.read(len(self._layout.header)) == self._layout.header

    def save(self, to: Path) -> PendingChecksum:
        """Makes a checkpoint's file of the state as it is now."""
        return self._state.save(to, self._tail)

    def fetch(self, memory: Tensor, moved: TransferStats) -> None:
        """Reads what the layer computes with into `UInt8[working.nbytes]`."""
        if self._working is None:
            with self._state.opened() as state:
                state.read(memory, self._layout.places[0].offset)
        else:
            with self._working.opened() as working:
                working.read(memory, 0)
        moved.read_bytes += memory.numel()

    def store(self, gradients: Sequence[Tensor | None], staging: StagingBuffers, moved: TransferStats) -> None:
        """Writes the summed gradients of all weights that have one."""
        size = self.gradients.dtype.itemsize
        bounce = staging.sets[0][3]
        with _there(self._gradients).opened(write=True) as file:
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
        apply: ApplyUpdate,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        has: Sequence[bool],
        *,
        memory: Tensor | None,
        staging: StagingBuffers,
        lane: TransferQueue,
        moved: TransferStats,
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
            source, into = stack.enter_context(self._state.changing())
            stored = None
            if gradients is None and any(has):
                stored = stack.enter_context(_there(self._gradients).opened())

            def read(sets: list[Tensor], piece: _Piece) -> None:
                for memory, at in self._spots(sets, piece):
                    source.read(memory, at)
                    moved.read_bytes += memory.numel()
                if stored is not None and has[piece.weight]:
                    memory, at = self._gradient_at(sets[-1], piece)
                    stored.read(memory, at)
                    moved.read_bytes += memory.numel()

            def work(sets: list[Tensor], piece: _Piece) -> None:
                self._piece(sets, piece, apply, weights, gradients, has, staging)

            def write(sets: list[Tensor], piece: _Piece) -> None:
                for memory, at in self._spots(sets, piece):
                    into.write(memory, at)
                    moved.written_bytes += memory.numel()

            lane.pass_through(list(self._pieces()), staging.sets, read, work, write)
            self._updates = [n + did for n, did in zip(self._updates, has, strict=True)]
            if into is not source:
                self._tail(into)
        if memory is not None and self._working is not None:
            with self._working.opened(write=True) as file:
                file.write(memory, 0)
            moved.written_bytes += memory.numel()

    def _tail(self, file: StoreHandle) -> None:
        """Writes the counts of updates, and whatever else no update writes."""
        write_tail(file, self._layout, self._updates, [b for _, b in self._buffers])

    def _gradient_at(self, memory: Tensor, piece: _Piece) -> tuple[Tensor, int]:
        """What a stored piece of gradient takes of memory, and where it lies in the file."""
        size = self.gradients.dtype.itemsize
        at = self.gradients.slices[piece.weight].offset + size * piece.first
        return memory[: round_up_to_page(size * piece.elements)], at

    def _piece(
        self,
        at: list[Tensor],
        piece: _Piece,
        apply: ApplyUpdate,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        has: Sequence[bool],
        staging: StagingBuffers,
    ) -> None:
        """Updates one piece that has been read."""
        index, count = piece.weight, piece.elements
        master, moments = self._views(at, piece)
        if has[index]:
            near = None if gradients is None else gradients[index]
            dtype = self.gradients.dtype
            gradient = (
                at[3][: dtype.itemsize * count].view(dtype) if near is None else _part(near, piece)
            )
            if gradient.dtype != torch.float32:
                gradient = staging.converted[:count].copy_(gradient)
            apply(
                ParameterPart(
                    name=self._layout.masters.slices[index].name, offset=piece.first,
                    master=master, moments=moments, gradient=gradient,
                    updates=self._updates[index], decays=self._decays[index],
                )
            )  # fmt: skip
        _part(weights[index].detach(), piece).copy_(master)

    def _pieces(self) -> Iterator[_Piece]:
        for index, part in enumerate(self._layout.masters.slices):
            elements = part.nbytes // 4
            for first in range(0, elements, _PIECE):
                yield _Piece(index, first, min(_PIECE, elements - first))

    def _spots(self, sets: Sequence[Tensor], piece: _Piece) -> Iterator[tuple[Tensor, int]]:
        """The memory of everything in a piece of the state, and where it lies in the file."""
        for place in self._layout.places:
            at, nbytes = place.spot(piece.weight, piece.first, piece.elements)
            which, begin = _MEMORY[place.kind]
            yield sets[which][begin : begin + round_up_to_page(nbytes)], at

    def _views(self, sets: Sequence[Tensor], piece: _Piece) -> tuple[Tensor, tuple[StoredMoment, StoredMoment]]:
        """Master and moments of a piece, in the memory that it was read into."""
        found: dict[str, Tensor] = {}
        for place in self._layout.places:
            _, nbytes = place.spot(piece.weight, piece.first, piece.elements)
            which, begin = _MEMORY[place.kind]
            found[place.kind] = sets[which][begin : begin + nbytes].view(place.region.dtype)
        first = StoredMoment(found["moment1"], found.get("scale1"))
        return found["weight"], (first, StoredMoment(found["moment2"], found.get("scale2")))

    def _make_rest(self, staging: StagingBuffers) -> None:
        """What lies beside the state."""
        if self._working is not None:
            self._working.make()
            self._fill(self._working, staging)
        if self._gradients is not None and self._gradients is not self._working:
            self._gradients.make()

    def _fill(self, shelf: BackingStore, staging: StagingBuffers) -> None:
        """Makes the working weights from the masters."""
        with self._state.opened() as state, shelf.opened(write=True) as file:
            for piece in self._pieces():
                memory, into = staging.sets[0][0], staging.sets[0][1]
                at, _ = self._layout.places[0].spot(*piece)
                state.read(memory[: round_up_to_page(4 * piece.elements)], at)
                nbytes = self.working.dtype.itemsize * piece.elements
                master = memory[: 4 * piece.elements].view(torch.float32)
                into[:nbytes].view(self.working.dtype).copy_(master)
                into[nbytes : round_up_to_page(nbytes)].zero_()
                part = self.working.slices[piece.weight]
                at = part.offset + self.working.dtype.itemsize * piece.first
                file.write(into[: round_up_to_page(nbytes)], at)


def _there(shelf: BackingStore | None) -> BackingStore:
    if shelf is None:
        raise ValueError("no gradient of this layer waits for its update")
    return shelf


def _part(tensor: Tensor, piece: _Piece) -> Tensor:
    """The piece of a whole weight or gradient."""
    return tensor.reshape(-1)[piece.first : piece.first + piece.elements]
