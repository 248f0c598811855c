"""The frozen weights of one offloaded layer: read where they stand, or written once.

Where the files of the base have them as the layer computes with them, or in fewer bits that become
these without rounding, they stay there: each phase reads their bytes, and a checkpoint says where
they are. Else they are written to a file of their own, to which every checkpoint has a hard link.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from windlass.atomic_files import atomic_write, link_or_copy
from windlass.errors import CheckpointError
from windlass.models import LayerStack, WeightPlace, WeightPlaces, base_places
from windlass.runtime.checkpoint.layer_tensors import frozen_file, places_file
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, SavedFile
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.direct_io import page_aligned_buffer, round_up_to_page
from windlass.runtime.offload.state_layout import TensorRegion, frozen_layout, write_bytes
from windlass.runtime.offload.transfer_queue import TransferStats
from windlass.runtime.optimizer_state.optimizer_state import DTYPES
from windlass.schema import DEVICE_TIER, HOST_TIER, Plan

_PIECE_ELEMENTS = 2**20
"""Elements that are converted at a time."""


class FrozenWeights:
    """The frozen weights of one layer, in the run's precision and nothing else.

    Args:
        weights: shape of each frozen weight that the layer owns, by its name in a checkpoint.
    """

    def __init__(
        self, stores: BackingStores, index: int, plan: Plan, weights: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._layout = frozen_layout(weights, DTYPES[plan.precision])
        self.region: TensorRegion = self._layout.region
        """Where each weight stands in memory."""
        self._reads_files = frozen_tier(plan) != HOST_TIER
        self._stores = stores
        self._store = stores.create(
            frozen_tier(plan), f"layer-{index:04d}.frozen.safetensors", self._layout.nbytes
        )
        self._places: WeightPlaces | None = None
        """Where the weights stand in files of the base; None if the store has them."""
        self._whole: WeightPlaces | None = None
        """The same of the whole weights, which checkpoints refer to."""
        self._checksum: FileChecksum | None = None
        """Checksum of the file in every checkpoint; None before the first one."""

    def leave_in(
        self,
        places: Mapping[str, WeightPlace],
        whole: Mapping[str, WeightPlace] | None = None,
    ) -> bool:
        """Lets the weights be read where they stand, if they stand there as they are computed with.

        Args:
            whole: where the weights stand of which these are parts; None if they are whole.

        Returns:
            False if they must be stored, for which nothing was done.
        """
        wanted = {extent.name: extent.shape for extent in self.region.extents}
        if self._reads_files and stand_as(places, wanted, self.region.dtype):
            self._places = WeightPlaces.of({name: places[name] for name in wanted})
            self._whole = self._places if whole is None else WeightPlaces.of(whole)
        return self._places is not None

    def adopt(self, file: Path) -> bool:
        """Takes the weights from a checkpoint's file without copying, if it has them alike.

        Returns:
            False if they must be stored, for which nothing was done.
        """
        header = self._layout.header
        if not file.exists():
            return False
        with file.open("rb") as content:
            if content.read(len(header)) != header:
                return False
        self._store.adopt_file(file)
        return True

    def create(self, full_weight: Callable[[str], Tensor]) -> None:
        """Allocates the store, and fills it weight by weight."""
        self._store.allocate()
        begin = len(self._layout.header)
        with self._store.open(write=True) as file:
            write_bytes(file, self._layout.header, 0)
            for extent in self.region.extents:
                memory = page_aligned_buffer(round_up_to_page(extent.nbytes))
                memory[extent.nbytes :].zero_()
                values = memory[: extent.nbytes].view(self.region.dtype).view(extent.shape)
                values.copy_(full_weight(extent.name).detach())
                file.write(memory, begin + extent.offset)

    def read(self, memory: Tensor, stats: TransferStats) -> None:
        """Reads all of them into `memory`, `UInt8[region.nbytes]`.

        Raises:
            CheckpointError: a file of the base was changed, or cannot be read.
        """
        if self._places is None:
            with self._store.open() as file:
                file.read(memory, len(self._layout.header))
            stats.read_bytes += memory.numel()
            return
        if changes := [*self._places.changes()]:
            raise CheckpointError(f"the run reads frozen weights in place: {'; '.join(changes)}")
        for extent in self.region.extents:
            values = memory[extent.offset : extent.offset + extent.nbytes]
            self._read_place(self._places.weights[extent.name], values, stats)

    def _read_place(self, place: WeightPlace, values: Tensor, stats: TransferStats) -> None:
        """Reads one weight into `UInt8[n]`, to its end if it stands in fewer bits."""
        stored_bytes = sum(part.nbytes for part in place.ranges)
        stored = values[len(values) - stored_bytes :]
        start = 0
        for part in place.ranges:
            with self._stores.open_file(part.file) as file:
                file.read(stored[start : start + part.nbytes], part.offset)
            start += part.nbytes
        stats.read_bytes += stored_bytes
        if place.torch_dtype != self.region.dtype:
            _widen(stored.view(place.torch_dtype), values.view(self.region.dtype))

    @property
    def is_left(self) -> bool:
        """Whether the weights are read where they stand."""
        return self._places is not None

    def save(self, beside: Path) -> SavedFile:
        """Gives a checkpoint the weights: a hard link to their file, or the places of its bytes.

        Args:
            beside: the file of what is trained of the layer; of the whole one, even if this device
                has a shard of it, if the weights are left where they stand.
        """
        if self._whole is not None:
            path = places_file(beside)
            atomic_write(path, self._whole.to_json())
            return SavedFile(path, lambda: FileChecksum.of(path))
        path, checksum = frozen_file(beside), self._checksum
        if checksum is not None and self._link_earlier(path):
            return SavedFile(path, lambda: checksum)
        pending = self._store.save_as(path, lambda _: None)

        def first_checksum() -> FileChecksum:
            self._checksum = self._checksum or pending()
            return self._checksum

        return SavedFile(path, first_checksum)

    def _link_earlier(self, path: Path) -> bool:
        """Links to the file of an earlier checkpoint that this run has written, if there is one."""
        earlier = max(path.parent.parent.glob(f"step-*/{path.name}"), default=None)
        if earlier is None:
            return False
        try:
            link_or_copy(earlier, path)
        except FileNotFoundError:  # another rank has just removed it
            return False
        return True


def frozen_tier(plan: Plan) -> str:
    """The tier of frozen weights: that of parameters, or of the state where these stay."""
    offload = plan.offload
    return offload.optimizer if offload.parameters == DEVICE_TIER else offload.parameters


def stand_as(
    places: Mapping[str, WeightPlace], wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> bool:
    """Whether weights stand in files in their shape, and become the type without rounding."""
    return bool(wanted) and all(
        name in places
        and places[name].shape == shape
        and torch.promote_types(places[name].torch_dtype, dtype) == dtype
        for name, shape in wanted.items()
    )


def _widen(narrow: Tensor, wide: Tensor) -> None:
    """Converts values that stand at the end of the memory of the result.

    From the first on, in pieces: none is overwritten before it is read.
    """
    for start in range(0, len(wide), _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        wide[piece] = narrow[piece].clone()


def places_of_base(stack: LayerStack, plan: Plan) -> dict[str, WeightPlace]:
    """Where all frozen weights of a model stand, by full name; none if any of them must be stored.

    So a run needs the files of its base for all of them or for none. Tensor-parallel ranks have
    parts of weights that are in no order of a file.
    """
    if frozen_tier(plan) in (HOST_TIER, DEVICE_TIER) or plan.parallel.tensor > 1:
        return {}
    places = base_places(stack)
    wanted = {name: place.shape for name, place in places.items()}
    return places if stand_as(places, wanted, DTYPES[plan.precision]) else {}
