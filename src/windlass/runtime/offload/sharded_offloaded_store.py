"""Streams of a pod: the moves of one device of several, which exchanges what it has moved.

Each device is home to its share of its stage's layers. Where replicas share weights a fetch brings
the shard, `gather` makes the layer whole of all their shards, and the shard is dropped at once.
Where weights stay near, more replicas may share the state than the weights: then what a device
updates is a part of what it holds, and `spread` puts the parts together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from windlass.atomic_files import storage_errors
from windlass.models.layer_stack import LayerStack, materialize_layer
from windlass.program.device_mesh import layers_of_stage
from windlass.program.instruction import InstructionKind, Program
from windlass.program.zero_sharding import updates_per_shard
from windlass.runtime.adamw import AdamW
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file, load_layer_shard
from windlass.runtime.distributed.flat_shard import LayerShard, remote_layer_parameters, writes_checkpoint
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.handler import Handler
from windlass.runtime.offload.offloaded_store import OffloadedStore
from windlass.runtime.offload.transfer_queue import TransferQueue
from windlass.runtime.checkpoint.safetensors_io import SavedFile
from windlass.runtime.parameters import (
    DTYPES,
    LayerParameters,
    ModelParameter,
    MasterParameter,
    master_dtype,
    persistent_buffers,
    new_master_parameter,
)
from windlass.schema.plan import Plan


class ShardedOffloadedStore(OffloadedStore):
    """The moves of one device of several.

    Args:
        plan: whose weights and optimizer state have their home beyond the near tier.
        chain: the model.
        folder: of what lives in files; made if need be.
        optimizer: applied in the lane.
        lane: of all moves.
        device: that computes, and whose near tier layers come to.
        pod: the device among the others.
        program: that will run; says whose gradients wait at home.
        seed: of the initial weights.
        before_update: called with a layer's index before its state changes.
    """

    def __init__(
        self,
        plan: Plan,
        chain: LayerStack,
        folder: Path,
        optimizer: AdamW,
        lane: TransferQueue,
        device: torch.device,
        pod: ProcessGroups,
        *,
        program: Program,
        seed: int,
        before_update: Callable[[int], None],
    ) -> None:
        self._pod = pod
        self._shares_weights = plan.sharding.parameters > 1
        self._share: dict[int, LayerShard] = {}
        self._shards: dict[int, Sequence[Tensor]] = {}
        """Near shards of layers, segment by segment."""
        self._parted = updates_per_shard(plan) > 1
        """Whether a device updates a part of the weights that it holds; these then stay near."""
        self._flat: dict[int, Tensor] = {}
        """The weights that are held of each layer, of which a part is the device's own."""
        self._gradients: dict[int, list[Tensor | None]] = {}
        """Of segments, once they are whole."""
        super().__init__(
            plan, chain, folder, optimizer, lane, device,
            program=program, seed=seed, before_update=before_update,
        )  # fmt: skip

    # What is there at the start.

    def initialize(self, checkpoint: Checkpoint | None) -> None:
        """Makes the state of a new run, or takes that of a checkpoint over.

        Raises:
            CheckpointError: it is of another model.
            StorageError: the disk is full, or does not take files.
        """
        super().initialize(checkpoint)
        for index, share in self._share.items() if self._parted else ():
            self._take_part(index, share)

    def _take_part(self, index: int, share: LayerShard) -> None:
        """Makes what the device holds of a layer, of which its own part came from home."""
        if not share.elements:
            return
        flat = torch.zeros(share.held, dtype=DTYPES[self._plan.precision], device=self._device)
        part = self._own_part(flat, share)
        own = [part[each.at].view(each.shape) for each in share.segments]
        for mine, came in zip(own, self._shards[index], strict=True):
            mine.copy_(came.detach())
        self._flat[index], self._shards[index] = flat, own
        self._near[index] = self._near[index]._replace(memory=flat)
        self._pod.put_together(flat, part)
        if not self._shares_weights:
            share.place(flat)

    def _own_part(self, flat: Tensor, share: LayerShard) -> Tensor:
        return flat[share.begin - share.held_begin :][: share.part]

    @property
    def _stage(self) -> int:
        return self._pod.place.stage

    def _laid_out(self, waiting: frozenset[int | None]) -> Iterator[LayerParameters]:
        here = layers_of_stage(self._plan, self._pod.place.stage)
        known: dict[str, ModelParameter] = {}
        for index, name in enumerate(self._chain.names):
            if index not in here:
                yield remote_layer_parameters(name)
                continue
            real = self._with_buffers(index)
            share = LayerShard(self._plan, self._chain, index, real, self._pod, self._device)
            self._share[index] = share
            named = {share.marked(each): tuple(each.shape) for each in share.segments}
            buffers = persistent_buffers(name, real) if share.first else {}
            self._homes[index] = self._home(
                index, named, buffers, waits=index in waiting,
                decays=[each.decays for each in share.segments],
            )  # fmt: skip
            yield share.with_ties(known, self._chain.tied_weights)

    def _create(self) -> None:
        with storage_errors(self._folder):
            for index, home in self._homes.items():
                layer = materialize_layer(self._chain, index, seed=self._seed, device="cpu")
                home.create(
                    [weight.master for weight in self._weights(index, layer)], self._staging
                )

    def _adopt(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.manifest.step
        with storage_errors(self._folder):
            for index, home in self._homes.items():
                share, layer = self._share[index], self.layers[index]
                if not (share.segments or layer.persistent_buffers):
                    continue
                own = self._weights(index, None)
                load_layer_shard(checkpoint, index, own, layer, share.pieces)
                masters = [weight.master.detach() for weight in own]
                moments = [weight.moments for weight in own]
                home.create(masters, self._staging, moments, updates=step)

    def _weights(self, index: int, layer: torch.nn.Module | None) -> list[MasterParameter]:
        """The segments of a layer with state of their own, zeros without a layer."""
        share, precision = self._share[index], self._plan.precision
        if layer is None:
            part = torch.zeros(share.part, dtype=master_dtype(precision))
        else:
            part = share.flat(layer).cpu()[share.begin :][: share.part]
        return [
            new_master_parameter(
                each.name, mine, mine, self._plan.moments, decays=each.decays, offset=each.first
            )
            for each in share.segments
            for mine in (part[each.at].view(each.shape),)
        ]

    # What the program asks for.

    def handlers(self) -> Mapping[InstructionKind, Handler]:
        """The handlers of moves, and of what brings shares together."""
        return {
            **super().handlers(),
            "unshard_weights": self._gather,
            "free_shard": lambda layer, _: self._drop(layer),
            "reduce_grads": self._reduce,
            "all_gather_params": self._spread,
        }

    def release(self, layer: int, micro: int) -> None:
        """Frees the near copy of a layer's whole weights."""
        if not self._shares_weights:
            super().release(layer, micro)
        else:
            self._share[layer].release()

    def _drop(self, layer: int) -> None:
        if not self._shares_weights:
            super()._drop(layer)
            return
        self._near.pop(layer).there.wait()
        self._shards.pop(layer, None)

    def _gather(self, layer: int, _: int) -> None:
        """Makes a layer whole of all replicas' shards."""
        share = self._share[layer]
        self._near[layer].there.wait()
        shard = self._shard(layer, share)
        whole = torch.empty(share.elements, dtype=shard.dtype, device=self._device)
        self._pod.gather(whole, shard)
        share.place(whole)

    def _shard(self, layer: int, share: LayerShard) -> Tensor:
        """What the device holds of a layer, laid flat."""
        if self._parted:
            return self._flat[layer]
        dtype = DTYPES[self._plan.precision]
        shard = torch.zeros(share.held, dtype=dtype, device=self._device)
        for each, part in zip(share.segments, self._shards[layer], strict=True):
            shard[each.at] = part.detach().view(-1)
        return shard

    def _spread(self, layer: int, _: int) -> None:
        """Puts the parts of a layer's weights together that this device and others have updated."""
        if layer in self._flat:
            self._near[layer].there.wait()
            flat = self._flat[layer]
            self._pod.spread(flat, self._own_part(flat, self._share[layer]))

    def wait_for_layer(self, layer: int) -> None:
        """Returns when all weights that a layer computes with are near.

        Raises:
            StorageError: they cannot be read.
        """
        if not self._shares_weights:
            super().wait_for_layer(layer)

    def load_layers(self, layers: Sequence[int]) -> None:
        """Brings layers near and makes them whole, for a forward pass outside of a step."""
        super().load_layers(layers)
        if self._shares_weights:
            for owner in sorted({at for layer in layers for at in self._needs[layer]}):
                self._gather(owner, 0)

    def free_layers(self, layers: Sequence[int]) -> None:
        """Frees layers; of those that are near between steps the shard stays."""
        if not self._shares_weights:
            super().free_layers(layers)
            return
        for owner in sorted({at for layer in layers for at in self._needs[layer]}):
            self.release(owner, 0)
            if owner not in self._resident:
                self._drop(owner)

    def _reduce(self, layer: int, _: int) -> None:
        self._share[layer].reduce()

    def begin_step(self, step: int) -> None:
        """A step begins: gradients that go home are of it."""
        super().begin_step(step)
        self._gradients.clear()
        for share in self._share.values():
            share.forget()

    def grads_for_norm(self, layer: int) -> Sequence[ModelParameter]:
        """The gradients that the norm reads: of what all slices have, those of the first."""
        if layer not in self._share:
            return ()
        share = self._share[layer]
        return tuple(
            ModelParameter(name=each.name, working=gradient, shape=each.shape, gradient=gradient)
            for each, gradient in zip(share.segments, self._whole_gradients(layer), strict=True)
            if gradient is not None and share.answers_for(each)
        )

    def _whole_gradients(self, layer: int) -> list[Tensor | None]:
        """Of each segment."""
        if layer not in self._gradients:
            self._gradients[layer] = self._share[layer].summed()
        return self._gradients[layer]

    @property
    def counts_in_norm(self) -> bool:
        """Whether this replica's shards count in the norm: each shard is on several."""
        return self._pod.place.data_rank < self._plan.sharding.optimizer

    def _taken(self, layer: int) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        gradients = self._whole_gradients(layer)
        del self._gradients[layer]
        return gradients, tuple(gradient is not None for gradient in gradients)

    def _held(self, layer: int) -> list[Tensor]:
        if self._shares_weights or self._parted:
            return [part.detach() for part in self._shards[layer]]
        return super()._held(layer)

    def _place(self, layer: int, views: Sequence[Tensor]) -> None:
        if self._shares_weights or self._parted:
            self._shards[layer] = views
        else:
            super()._place(layer, views)

    def save_layer(self, layer: int, to: Path) -> SavedFile | None:
        """Saves this device's share, if another device does not save the same."""
        if layer not in self._share or not writes_checkpoint(layer, self._plan, self._pod):
            return None
        share = self._share[layer]
        if not (share.segments or self.layers[layer].persistent_buffers):
            return None
        if not share.whole:
            to = to.with_name(layer_file(layer, shard=share.at))
        return SavedFile(to, self._homes[layer].save(to))
