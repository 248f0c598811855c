"""What an offloaded layer begins with: weights that are drawn or read, or those of a checkpoint."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from windlass.models import WeightPlace, materialize_layer
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.layer_tensors import (
    frozen_file,
    places_file,
    read_places,
    read_tensors,
)
from windlass.runtime.checkpoint.load_state import load_layer_shard, read_weight
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.offload.frozen_weights import FrozenWeights, stand_as
from windlass.runtime.offload.layer_state import OffloadedLayerState
from windlass.runtime.offload.offload_tier import OffloadTier
from windlass.runtime.offload.staging_buffers import StagingBuffers
from windlass.runtime.optimizer_state.optimizer_state import state_format, stored_dtype
from windlass.runtime.parameters import LayerParameters, MasterParameter, new_master_parameter


def create_state(
    tier: OffloadTier, shard: LayerShard, state: OffloadedLayerState, frozen: FrozenWeights | None
) -> None:
    """Creates the state of a new run; frozen weights that stand in files are left there."""
    stack, places = tier.context.stack, tier.places
    whole = {name: places[name] for name in shard.frozen_of_layer if name in places}
    left = frozen is not None and leave_shard_in(frozen, shard, whole)
    source, prefix = stack.weights, f"{shard.name}."
    known = frozenset[str]() if source is None else source.parameters
    read_alone = {weight.name for weight in shard.frozen if weight.name in known}
    unused = {*shard.shapes} - {*shard.pieces} | read_alone | {*(whole if left else ())}
    layer = materialize_layer(
        stack, shard.index, seed=tier.context.seed, device="cpu", tied=False,
        empty=[name.removeprefix(prefix) for name in unused],
    )  # fmt: skip
    named = {f"{prefix}{path}": p.detach() for path, p in layer.named_parameters()}
    masters = [shard.values(segment, named.__getitem__) for segment in shard.segments]
    state.create(masters, tier.staging)
    if frozen is None or left:
        return

    def full_weight(name: str) -> Tensor:
        # One at a time is in memory.
        return named[name] if source is None or name not in read_alone else source.read(name)

    frozen.create(shard.frozen_values(full_weight))


def load_state(
    checkpoint: Checkpoint, layer: LayerParameters, staging: StagingBuffers, shard: LayerShard,
    state: OffloadedLayerState, frozen: FrozenWeights | None,
) -> None:  # fmt: skip
    """Takes the state of a checkpoint, without copying where the layout is the same.

    Raises:
        CheckpointError: the checkpoint is of another model, or refers to files that changed.
    """
    index = shard.index
    if not (shard.segments or shard.frozen_segments or layer.persistent_buffers):
        return
    file = checkpoint.path / layer_file(index)
    if shard.is_full_layer and state.adopt(file, staging):
        buffers = layer.persistent_buffers.items()
        read_tensors(file, {f"buffer/{name}": buffer for name, buffer in buffers})
    else:
        weights = _new_segments(shard)
        load_layer_shard(checkpoint, index, weights, layer, shard.pieces)
        state.create([weight.master.detach() for weight in weights], staging, weights)
    if frozen is not None:
        load_frozen_shard(frozen, shard, checkpoint)


def _new_segments(shard: LayerShard) -> list[MasterParameter]:
    """The segments that this rank updates, to be filled from a checkpoint."""
    state, dtype = state_format(shard.part.plan), stored_dtype(shard.part.plan)
    return [
        new_master_parameter(
            segment.name, master, master, state,
            decays=segment.decays, matrix=segment.matrix, offset=segment.weight_offset,
            factors=state.new_factors(shard.pieces[segment.name].full_shape, master),
        )
        for segment in shard.segments
        for master in (torch.zeros(segment.shape, dtype=dtype),)
    ]  # fmt: skip


def leave_shard_in(
    frozen: FrozenWeights, shard: LayerShard, whole: Mapping[str, WeightPlace]
) -> bool:
    """Lets one rank of several read its part of frozen weights where they stand, if it can.

    Args:
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


def load_frozen_shard(frozen: FrozenWeights, shard: LayerShard, checkpoint: Checkpoint) -> None:
    """Takes one rank's part of frozen weights from a checkpoint, or from beside its files.

    Raises:
        BaseChangedError: files that the checkpoint refers to were changed.
    """
    file = checkpoint.path / layer_file(shard.index)
    places = read_places(places_file(file))
    is_left = places is not None and leave_shard_in(frozen, shard, places.weights)
    if not (is_left or frozen.adopt(frozen_file(file))):
        full_weight = partial(read_weight, checkpoint, shard.index, shard.pieces)
        frozen.create(shard.frozen_values(full_weight))
