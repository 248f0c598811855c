"""LayerPart: what a rank keeps of the weights of one layer that the same ranks share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.optimizer_state.optimizer_state import Averaging
from windlass.runtime.parameters import LayerParameters, ModelParameter


class LayerPart(Protocol):
    """Weights and optimizer state of a part of a layer, in the tier that the plan says.

    What the tier or the group has nothing to do for does nothing.
    """

    shard: LayerShard
    """Which weights, and what of them this rank updates."""
    owned: Sequence[ModelParameter]
    """The weights that the layer computes with and updates."""

    def initialize(self, checkpoint: Checkpoint | None, layer: LayerParameters) -> None:
        """Creates the state of a new run, or loads that of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
            StorageError: the disk is full, or cannot be written to.
        """

    def grads_for_norm(self) -> Sequence[ModelParameter]:
        """What this rank counts in the norm of the reduced gradients.

        Values that several tensor-parallel ranks hold alike are counted by the first of them.
        """

    def drop_gradients(self) -> None:
        """Drops the gradients of this step that are in device memory."""

    def update(self, step: int, clip_divisor: Tensor | None) -> None:
        """Updates what this rank updates, or starts to."""

    def averaged(self, averaging: Averaging) -> AbstractContextManager[None]:
        """Lets the layer compute with averaged weights while it is open."""

    # Between tiers.

    def load(self) -> None:
        """Prefetches the weights, unless they are in device memory."""

    def prefetch(self) -> None:
        """Starts to bring the weights into device memory."""

    def gather_first(self) -> None:
        """Assembles this rank's weight shard from the parts that each rank has loaded."""

    def free_shard(self) -> None:
        """Frees what this rank itself has loaded, unless the layer still computes with it."""

    def free_own(self) -> None:
        """Frees what this rank itself has loaded."""

    def offload_grads(self) -> None:
        """Computes the norms of the accumulated gradients, and starts to offload them."""

    def wait_for_transfer(self) -> None:
        """Returns when its transfer has ended, if there is one."""

    # Between ranks.

    def gather(self) -> None:
        """All-gathers the full weights, or starts to, if ranks share them."""

    def unshard(self) -> None:
        """Does as `gather`, for an instruction of the program."""

    def wait(self, user: int) -> None:
        """Returns when the weights that the layer `user` computes with are in device memory.

        Raises:
            RunBroken: nobody has prefetched them.
            StorageError: they cannot be read.
        """

    def free(self) -> None:
        """Frees the full weights in device memory; with parameter sharding not the shard."""

    def unload(self, *, stays: bool) -> None:
        """Frees it after a pass outside of a step; what stays between steps stays."""

    def all_gather_params(self) -> None:
        """Combines the parts of its weight shard that this rank and others have updated."""
