"""The offloaded store of a rank whose weights fall into parts that replicas share in other ways.

Where ranks divide experts, a layer has two parts, and each has a store of its own. An instruction
of a layer is one of each part that has weights in it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from torch import Tensor

from windlass.program import InstructionKind, Program
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.distributed.flat_weights import weight_parts
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.interpreter import Handlers
from windlass.runtime.offload.sharded_offloaded_store import ShardedOffloadedStore
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.offload.transfer_queue import TransferQueue
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.parameters import LayerParameters, ModelParameter
from windlass.runtime.rank_context import RankContext


def sharded_offloaded_store(
    context: RankContext,
    optimizer: Optimizer,
    queue: TransferQueue,
    groups: ProcessGroups,
    *,
    before_update: Callable[[int], None],
) -> ParamStore:
    """The offloaded store of one rank among several.

    Args:
        context: what this rank runs.
        optimizer: optimizer, applied in the transfer queue.
        queue: the queue of all transfers.
        groups: the rank's process groups.
        before_update: called with a layer's index before its state changes.
    """
    staging = StagingBuffers(context.device, context.plan)
    stores = [
        ShardedOffloadedStore(
            context, optimizer, queue, groups, part, before_update=before_update, staging=staging
        )
        for part in weight_parts(context.plan, groups.coord, groups.experts)
    ]
    return stores[0] if len(stores) == 1 else CompositeStore(stores)


class CompositeStore:
    """A store of stores, one for each part of the weights.

    Args:
        stores: the stores of the parts; the first has what every replica computes with.
    """

    def __init__(self, stores: Sequence[ShardedOffloadedStore]) -> None:
        self._stores = stores
        by_name = {
            weight.name: weight
            for store in stores
            for layer in store.layers
            for weight in (*layer.owned, *layer.frozen)
        }
        self.layers: tuple[LayerParameters, ...] = tuple(
            _whole_layer(parts, by_name)
            for parts in zip(*(store.layers for store in stores), strict=True)
        )

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Creates the state of a new run, or loads that of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
            StorageError: the disk is full, or cannot be written to.
        """
        for store in self._stores:
            store.create_states(checkpoint)
        for store in self._stores:
            store.load_first_layers()

    def handlers(self) -> Handlers:
        """The handlers of transfers, and of collectives on weights and gradients."""
        by_store = [(store, store.handlers()) for store in self._stores]

        def run(kind: InstructionKind, layer: int, micro: int) -> None:
            for store, handlers in by_store:
                if store.has_layer(layer):
                    handlers[kind](layer, micro)

        return {kind: partial(run, kind) for kind in by_store[0][1]}

    def begin_step(self, step: int) -> None:
        """Prepares for a step, and drops the gradients of one that was aborted."""
        for store in self._stores:
            store.begin_step(step)

    @property
    def offloaded_grad_norms(self) -> Mapping[int, list[Tensor]]:
        """Norms of this step's offloaded gradients that this rank contributes, by layer."""
        norms: dict[int, list[Tensor]] = {}
        for store in self._stores:
            for layer, own in store.offloaded_grad_norms.items():
                norms.setdefault(layer, []).extend(own if store.counts_in_norm else ())
        return norms

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """Parameters whose gradients this rank contributes to the norm, each element once."""
        counted = (store for store in self._stores if store.counts_in_norm)
        return tuple(chain.from_iterable(store.grads_for_norm(layer) for store in counted))

    counts_in_norm = True  # what does not count was left out above

    def wait_for_layer(self, layer: int) -> None:
        """Returns when all weights that a layer computes with are in device memory.

        Raises:
            StorageError: they cannot be read.
        """
        for store in self._stores:
            store.wait_for_layer(layer)

    def drop_gradients(self) -> None:
        """Drops all gradients of this step, those in device memory and offloaded ones."""
        for store in self._stores:
            store.drop_gradients()

    def finish_backward(self, clip_divisor: Tensor | None) -> None:
        """Keeps the divisor for the offloaded gradients of this step."""
        for store in self._stores:
            store.finish_backward(clip_divisor)

    def update(self, layer: int, step: int, clip_divisor: Tensor | None) -> None:
        """Starts to update a layer."""
        for store in self._stores:
            if store.has_layer(layer):
                store.update(layer, step, clip_divisor)

    def flush_deferred_updates(self, program: Program) -> None:
        """Applies the updates that were deferred, so that the offloaded state is up to date."""
        for store in self._stores:
            store.flush_deferred_updates(program)

    def load_layers(self, layers: Sequence[int]) -> None:
        """Loads and all-gathers layers, for a forward pass outside of a step."""
        for store in self._stores:
            store.load_layers(layers)

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees layers; what stays in device memory between steps stays."""
        for store in self._stores:
            store.free_layers(layers)

    @contextmanager
    def averaged(self, averaging: Averaging) -> Iterator[None]:
        """Lets layers compute with averaged weights while it is open."""
        with ExitStack() as stack:
            for store in self._stores:
                stack.enter_context(store.averaged(averaging))
            yield

    def save_layer(self, layer: int, to: Path) -> tuple[SavedFile, ...]:
        """Saves this rank's shards of a layer, except those that another rank saves."""
        return tuple(chain.from_iterable(store.save_layer(layer, to) for store in self._stores))

    def close(self) -> None:
        """Frees the host memory and removes the state's files; the queue must have ended."""
        for store in reversed(self._stores):
            store.close()


def _whole_layer(
    parts: Sequence[LayerParameters], by_name: Mapping[str, ModelParameter]
) -> LayerParameters:
    """A layer of which each store has a part.

    Args:
        parts: the parts; the first has all buffers.
        by_name: all weights that stores own, by full name.
    """
    first = parts[0]
    return replace(
        first,
        owned=tuple(chain.from_iterable(part.owned for part in parts)),
        frozen=tuple(chain.from_iterable(part.frozen for part in parts)),
        used=tuple(by_name.get(weight.name, weight) for weight in first.used),
    )
