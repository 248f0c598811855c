"""The ranks that hold parts of a layer, as optimizers ask them for norms and whole matrices."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from windlass.runtime.distributed.flat_weights import Segment
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.distributed.shards.flat_shard import LayerShard


class ShardRanks:
    """The ranks that hold parts of one layer's weights, for the optimizer."""

    def __init__(self, shard: LayerShard, groups: ProcessGroups, like: Tensor) -> None:
        self._shard, self._groups, self._like = shard, groups, like

    def sum(
        self, own: Mapping[str, Tensor], length: Callable[[tuple[int, ...]], int]
    ) -> Mapping[str, Tensor]:
        """Sums over all parts of each weight; of equal parts the first counts."""
        shard = self._shard
        counted = {s.name for s in shard.segments if shard.is_responsible_for(s)}
        sums: dict[str, Tensor] = {}
        for weight in shard.parameters:
            zeros = self._like.new_zeros(length(shard.pieces[weight.name].full_shape))
            sums[weight.name] = own.get(weight.name, zeros) if weight.name in counted else zeros
        if not sums:
            return {}
        flat = torch.cat(list(sums.values()))
        self._groups.sum_over_shards(flat)
        return dict(zip(sums, flat.split([len(each) for each in sums.values()]), strict=True))

    @property
    def matrices(self) -> Sequence[str]:
        """Full names of all matrices of the layer that are updated whole, in order."""
        shard = self._shard
        names = [weight.name for weight in shard.parameters] if shard.is_hidden else []
        return [name for name in names if len(shard.pieces[name].full_shape) == 2]

    def gather(self, name: str, own: Tensor | None) -> Tensor:
        """A whole matrix, from the parts of all ranks; of equal parts the first counts."""
        shard = self._shard
        piece = shard.pieces[name]
        full = self._like.new_zeros(piece.full_shape)
        segment = self._segment(name)
        if own is not None and segment is not None and shard.is_responsible_for(segment):
            part = self._like.new_zeros(piece.shape)
            part.view(-1)[segment.weight_offset :][: own.numel()] = own.reshape(-1)
            piece.write_into(full, part)
        self._groups.sum_over_shards(full)
        return full

    def part(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of a whole matrix, in the shape of its segment."""
        segment = self._segment(name)
        if segment is None:
            return full.new_empty(0)
        flat = self._shard.pieces[name].extract(full).reshape(-1)
        return flat[segment.weight_offset :][: segment.shape.numel()].view(segment.shape)

    def _segment(self, name: str) -> Segment | None:
        return next((s for s in self._shard.segments if s.name == name), None)
