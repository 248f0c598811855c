"""Builds the layers of a rank, and knows each of its weights by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.stage import Chunk, StageLayer
from windlass.engines.torch.step_data import StepData
from windlass.models import ParamShard, layer_sharding, materialize_layer, param_shards
from windlass.program import chunks_of_stage, recompute_mode, stages_by_layer
from windlass.runtime import (
    DTYPES,
    LayerTemplate,
    RankContext,
    master_dtype,
    persistent_buffers,
)

_MATRIX = 2
"""Dimensions of a matrix; weights with fewer never decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeight:
    """A weight that this rank holds a part of."""

    name: str
    """Full name; of a tied weight the owner's."""
    layer: int
    """The layer that owns it."""
    parameter: nn.Parameter
    """FSDP's shard of the tensor-parallel rank's part."""
    shard: ParamShard
    """Which part of the full weight the tensor-parallel rank has."""
    is_copy: bool
    """Whether another stage owns it: its gradients are summed, and only the owner counts."""
    group: dist.ProcessGroup | None
    """The stages that have copies of it; None if no other has."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return len(self.shard.full_shape) >= _MATRIX

    @property
    def is_whole(self) -> bool:
        """Whether every tensor-parallel rank has all of it."""
        return not self.shard.is_sharded


class StageWeights:
    """The layers of a rank, sharded by FSDP, and their weights."""

    def __init__(
        self,
        context: RankContext,
        ranks: MeshRank,
        templates: tuple[LayerTemplate, ...],
        data: StepData,
    ) -> None:
        self._context, self._ranks, self._templates, self._data = context, ranks, templates, data
        self._stage_of = stages_by_layer(context.plan)
        self._parameters: dict[str, nn.Parameter] = {}
        self._shards: dict[str, ParamShard] = {}
        self._places: dict[str, tuple[StageLayer, str]] = {}
        self.buffers: dict[int, Mapping[str, Tensor]] = {}
        """Buffers that belong in a checkpoint by full name, by layer."""
        self.chunks = tuple(map(self._chunk, chunks_of_stage(context.plan, ranks.coord.stage)))
        """The model chunks of this stage, ascending."""
        self.weights = tuple(self._stage_weights())
        """All weights of this stage, each once."""
        for layer in context.stack.layers:
            layer.to_empty(device="meta")  # frees a model built in full: the shards are kept

    def _chunk(self, number: int) -> Chunk:
        stage, last = self._context.plan.stages[number], len(self._context.plan.stages) - 1
        layers = [self._layer(index) for index in range(stage.first_layer, stage.end_layer)]
        chunk = Chunk(layers, self._data, sends=number < last)
        self._shard(chunk)
        return chunk

    def _layer(self, index: int) -> StageLayer:
        """A layer with the tensor-parallel rank's part of its weights, before FSDP shards them."""
        context, stack = self._context, self._context.stack
        name, template = stack.names[index], self._templates[index]
        device = str(context.device.torch_device)
        layer = materialize_layer(stack, index, seed=context.seed, device=device)
        shards = param_shards(layer, layer_sharding(stack, index), self._ranks.tensor_parallel)
        weights: dict[str, nn.Parameter] = {}
        for inner in template.parameters:
            full = f"{name}.{inner}"
            owner = stack.tied_weights.get(full, full)
            if owner not in self._parameters:
                self._parameters[owner] = self._part(layer.get_parameter(inner), shards[inner])
                self._shards[owner] = shards[inner]
            weights[inner] = self._parameters[owner]
        self.buffers[index] = persistent_buffers(name, layer)
        mode = recompute_mode(context.plan, index)
        stage_layer = StageLayer(index, template, weights, tuple(layer.buffers()), self._data, mode)
        for inner in template.parameters:
            full = f"{name}.{inner}"
            self._places.setdefault(stack.tied_weights.get(full, full), (stage_layer, inner))
        return stage_layer

    def _part(self, full: nn.Parameter, shard: ParamShard) -> nn.Parameter:
        dtype = master_dtype(self._context.plan.precision)
        # A copy, because a view would keep the full weight alive.
        part = shard.extract(full.detach()).to(dtype=dtype, copy=True).contiguous()
        return nn.Parameter(part, requires_grad=full.requires_grad)

    def _shard(self, chunk: Chunk) -> None:
        """Shards a chunk layer by layer; layers that share weights are a group with the chunk.

        What is neither sharded nor summed nor cast stays as it is.
        """
        plan, mesh = self._context.plan, self._ranks.data_mesh
        working, wide = DTYPES[plan.precision], master_dtype(plan.precision)
        if mesh.size() == 1 and working == wide:
            return
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if working != wide:
            policy = MixedPrecisionPolicy(
                param_dtype=working, reduce_dtype=wide, cast_forward_inputs=False
            )
        reshard = bool(plan.sharding.reshard)
        shared = _layers_that_share(chunk)
        for layer in chunk.stage_layers:
            if layer.index not in shared:
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(chunk, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                # Losses are weighted by their share of all targets, so gradients are summed.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _stage_weights(self) -> Iterator[StageWeight]:
        stack, own_stage = self._context.stack, self._ranks.coord.stage
        stages = _stages_of_tied(stack.tied_weights, stack.layer_of, self._stage_of)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name, (layer, inner) in self._places.items():
            owner = stack.layer_of(name)
            several = stages.get(name, (own_stage,))
            if len(several) > 1 and several not in groups:
                groups[several] = self._ranks.group_of_stages(several)
            yield StageWeight(
                name=name,
                layer=owner,
                parameter=layer.weight(inner),
                shard=self._shards[name],
                is_copy=self._stage_of[owner] != own_stage,
                group=groups.get(several),
            )


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's own part of a sharded tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers_that_share(chunk: Chunk) -> set[int]:
    """The layers of a chunk that have a weight in common with another one."""
    first: dict[int, int] = {}
    shared: set[int] = set()
    for layer in chunk.stage_layers:
        for parameter in layer.parameters():
            index = first.setdefault(id(parameter), layer.index)
            if index != layer.index:
                shared |= {index, layer.index}
    return shared


def _stages_of_tied(
    tied: Mapping[str, str], layer_of: Callable[[str], int], stage_of: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The stages that use each tied weight, by the owner's name."""
    stages: dict[str, set[int]] = {}
    for user, owner in tied.items():
        stages.setdefault(owner, {stage_of[layer_of(owner)]}).add(stage_of[layer_of(user)])
    return {owner: tuple(sorted(each)) for owner, each in stages.items()}
