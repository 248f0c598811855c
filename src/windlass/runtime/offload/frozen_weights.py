"""The frozen weights of one offloaded layer: written once, and read for each phase."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from windlass.runtime.checkpoint.safetensors_io import FileChecksum, read_tensor, write_tensors
from windlass.runtime.offload.backing_store import BackingStores
from windlass.runtime.offload.direct_io import page_aligned_buffer, round_up_to_page
from windlass.runtime.offload.state_layout import TensorRegion, saved_names, tensor_region
from windlass.runtime.offload.transfer_queue import TransferStats
from windlass.runtime.optimizer_state.dtypes import DTYPES
from windlass.schema import DEVICE_TIER, Plan


class FrozenWeights:
    """The frozen weights of one layer, in the run's precision and nothing else.

    Args:
        stores: creates the backing store.
        index: index of the layer.
        plan: precision, and the tier of parameters.
        weights: shape of each frozen weight that the layer owns, by name.
    """

    def __init__(
        self, stores: BackingStores, index: int, plan: Plan, weights: Mapping[str, tuple[int, ...]]
    ) -> None:
        offload = plan.offload
        tier = offload.optimizer if offload.parameters == DEVICE_TIER else offload.parameters
        self.region: TensorRegion = tensor_region(weights, DTYPES[plan.precision])
        """Where each weight stands."""
        self._store = stores.create(tier, f"layer-{index:04d}.frozen", self.region.nbytes)

    def create(self, full_weight: Callable[[str], Tensor]) -> None:
        """Allocates the store, and fills it weight by weight.

        Args:
            full_weight: gives a weight by its full name.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        self._store.allocate()
        with self._store.open(write=True) as file:
            for extent in self.region.extents:
                memory = page_aligned_buffer(round_up_to_page(extent.nbytes))
                memory[extent.nbytes :].zero_()
                values = memory[: extent.nbytes].view(self.region.dtype).view(extent.shape)
                values.copy_(full_weight(extent.name).detach())
                file.write(memory, extent.offset)

    def read(self, memory: Tensor, stats: TransferStats) -> None:
        """Reads all of them into `memory`, `UInt8[region.nbytes]`."""
        with self._store.open() as file:
            file.read(memory, 0)
        stats.read_bytes += memory.numel()

    def save_with(self, trained: Path, to: Path) -> FileChecksum:
        """Writes a checkpoint file with the tensors of another one and the frozen weights.

        Args:
            trained: the file of the layer's trained weights and their state.
            to: the file to write, which does not exist yet.
        """
        memory = page_aligned_buffer(self.region.nbytes)
        with self._store.open() as file:
            file.read(memory, 0)
        named = {key: read_tensor(trained, key) for key in saved_names(trained)}
        views = zip(self.region.extents, self.region.views(memory), strict=True)
        named |= {f"weight/{extent.name}": view for extent, view in views}
        return write_tensors(to, named.items())
