"""What an offloaded layer begins with: weights that are drawn or read, or those of a checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from windlass.models import LayerStack, WeightPlace, materialize_layer
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.layer_tensors import (
    frozen_file,
    places_file,
    read_places,
    read_tensor,
    read_tensors,
)
from windlass.runtime.checkpoint.load_state import read_weight
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.offload.frozen_weights import FrozenWeights, stand_as
from windlass.runtime.offload.layer_state import OffloadedLayerState
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.parameters import LayerParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedLayer:
    """What is offloaded of one layer that this device has in full."""

    index: int
    parameters: LayerParameters
    state: OffloadedLayerState
    frozen: FrozenWeights | None
    """None if all of its weights are trained."""

    def create(
        self,
        stack: LayerStack,
        places: Mapping[str, WeightPlace],
        seed: int,
        staging: StagingBuffers,
    ) -> None:
        """Creates the state of a new run; frozen weights that stand in files are left there.

        Args:
            stack: the model.
            places: where all frozen weights stand, by full name; none if they must be stored.
            seed: seed of the weights that are drawn.
            staging: buffers to copy through.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        names = [weight.name for weight in self.parameters.frozen]
        left = self.frozen is not None and self.frozen.leave_in(places)
        prefix = f"{stack.names[self.index]}."
        source = stack.weights
        known = frozenset[str]() if source is None else source.parameters
        read_alone = [name for name in names if name in known]
        layer = materialize_layer(
            stack, self.index, seed=seed, device="cpu", tied=False,
            empty=[name.removeprefix(prefix) for name in read_alone],
        )  # fmt: skip
        named = {f"{prefix}{path}": p.detach() for path, p in layer.named_parameters()}
        masters = [named[weight.name].float() for weight in self.parameters.owned]
        self.state.create(masters, staging)
        if self.frozen is None or left:
            return

        def full_weight(name: str) -> Tensor:
            # One at a time is in memory.
            return named[name] if source is None or name not in read_alone else source.read(name)

        self.frozen.create(full_weight)

    def load(self, checkpoint: Checkpoint, staging: StagingBuffers) -> None:
        """Takes the state of a checkpoint, without copying where the layout is the same.

        Args:
            checkpoint: a complete checkpoint, with every layer in one file.
            staging: buffers to copy through.

        Raises:
            CheckpointError: the checkpoint is of another model, or refers to files that changed.
            OSError: the disk is full, or the folder cannot be written to.
        """
        layer, manifest = self.parameters, checkpoint.manifest
        if not (layer.owned or layer.frozen or layer.persistent_buffers):
            return
        file = checkpoint.path / layer_file(self.index)
        buffers = layer.persistent_buffers.items()
        read_tensors(file, {f"buffer/{name}": buffer for name, buffer in buffers})
        self.state.adopt_checkpoint(file, manifest.step, staging, seed=manifest.seed)
        if self.frozen is not None:
            load_frozen(self.frozen, file, partial(_saved_weight, file))


def offloaded_layers(
    layers: Sequence[LayerParameters],
    states: Mapping[int, OffloadedLayerState],
    frozen: Mapping[int, FrozenWeights],
) -> Iterator[OffloadedLayer]:
    """What is offloaded of each layer, by the states and the frozen weights of layers."""
    for index, state in states.items():
        yield OffloadedLayer(
            index=index, parameters=layers[index], state=state, frozen=frozen.get(index)
        )


def load_frozen(frozen: FrozenWeights, file: Path, full_weight: Callable[[str], Tensor]) -> None:
    """Takes frozen weights from beside a layer's file, or copies them.

    Args:
        frozen: the weights.
        file: the layer's file in a checkpoint.
        full_weight: gives a weight of the checkpoint by its name.

    Raises:
        BaseChangedError: files that the checkpoint refers to were changed.
    """
    places = read_places(places_file(file))
    is_left = places is not None and frozen.leave_in(places.weights)
    if not (is_left or frozen.adopt(frozen_file(file))):
        frozen.create(full_weight)


def _saved_weight(file: Path, name: str) -> Tensor:
    """A weight of a checkpoint's file by its full name."""
    return read_tensor(file, f"weight/{name}")


def leave_shard_in(
    frozen: FrozenWeights, shard: LayerShard, whole: Mapping[str, WeightPlace]
) -> bool:
    """Lets one rank of several read its part of frozen weights where they stand, if it can.

    Args:
        frozen: the rank's part of one layer.
        shard: what the rank has of the layer.
        whole: where all frozen weights of the layer stand, by full name, as far as that is known.

    Returns:
        False if they must be stored: parts that tensor-parallel ranks have are in no order of a
        file, and the rank that names all places in a checkpoint has some of the other weights.
    """
    is_named = shard.frozen_of_layer > {weight.name for weight in shard.frozen}
    if shard.part.experts is not None and not is_named:
        return False
    pieces = {weight.name: shard.pieces[weight.name] for weight in shard.frozen}
    # Whole shapes are compared, so that all ranks decide alike.
    shapes = {name: piece.full_shape for name, piece in pieces.items()}
    if any(piece.shape != piece.full_shape for piece in pieces.values()):
        return False
    if not stand_as(whole, shapes, frozen.region.dtype):
        return False
    parts = {
        shard.checkpoint_name(segment): whole[segment.name].flat_part(
            segment.weight_offset, tuple(segment.shape)
        )
        for segment in shard.frozen_segments
    }
    return frozen.leave_in(parts, whole)


def load_frozen_shard(
    frozen: FrozenWeights, shard: LayerShard, checkpoint: Checkpoint, index: int
) -> None:
    """Takes one rank's part of frozen weights from a checkpoint.

    Args:
        frozen: the rank's part of one layer.
        shard: what the rank has of the layer.
        checkpoint: a complete checkpoint, with every layer in one file.
        index: index of the layer.

    Raises:
        BaseChangedError: files that the checkpoint refers to were changed.
    """
    file = checkpoint.path / layer_file(index)
    places = read_places(places_file(file))
    is_left = places is not None and leave_shard_in(frozen, shard, places.weights)
    if not (is_left or frozen.adopt(frozen_file(file))):
        full_weight = partial(read_weight, checkpoint, index, shard.pieces)
        frozen.create(shard.frozen_values(full_weight).__getitem__)
