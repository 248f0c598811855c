"""What one rank keeps of one layer, or of a part of it, between uses."""

from dataclasses import dataclass

from torch import Tensor, nn

from windlass.program import updates_per_shard
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.distributed.shards.flat_shard import LayerShard
from windlass.runtime.optimizer_state.averages import Averaging
from windlass.runtime.optimizer_state.dtypes import DTYPES
from windlass.runtime.optimizer_state.state_format import state_format
from windlass.runtime.parameters import MasterParameter, new_master_parameter
from windlass.schema import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalLayer:
    """What this rank keeps of one layer between uses."""

    shard: LayerShard
    working: Tensor
    """Shard of the weights in the run's precision, `[param_shard_elements]`."""
    updated: Tensor
    """The part of it that this rank updates, `[optim_shard_elements]`."""
    parameters: tuple[MasterParameter, ...]
    """The segments of that part, with their optimizer state."""
    frozen: Tensor
    """Shard of the frozen weights in the run's precision, `[frozen_shard_elements]`."""

    @classmethod
    def of(cls, shard: LayerShard, layer: nn.Module, name: str, plan: Plan) -> "LocalLayer":
        """A part of a layer with new optimizer state.

        Args:
            shard: which part.
            layer: the layer, with real weights.
            name: the layer's name.
            plan: the plan of the run.
        """
        flat = shard.flatten(layer)
        working = flat[shard.param_shard_begin :][: shard.param_shard_elements]
        working = working.to(DTYPES[plan.precision]).clone()
        begin = shard.optim_shard_begin - shard.param_shard_begin
        updated = working[begin:][: shard.optim_shard_elements]
        same_dtype = updated.dtype == flat.dtype
        if same_dtype:
            masters = updated
        else:
            masters = flat[shard.optim_shard_begin :][: shard.optim_shard_elements].clone()
        parameters: list[MasterParameter] = []
        state = state_format(plan)
        for segment in shard.segments:
            segment_working = updated[segment.shard_slice].view(segment.shape)
            master = (
                segment_working if same_dtype else masters[segment.shard_slice].view(segment.shape)
            )
            parameters.append(
                new_master_parameter(
                    segment.name, master, segment_working, state,
                    decays=segment.decays, matrix=segment.matrix, offset=segment.weight_offset,
                    factors=state.new_factors(
                        shard.pieces[segment.name].full_shape, master,
                        shard.pieces[segment.name].ranges,
                    ),
                )
            )  # fmt: skip
        named = {f"{name}.{n}": p.detach() for n, p in layer.named_parameters()}
        return cls(
            shard=shard, working=working, updated=updated, parameters=tuple(parameters),
            frozen=shard.frozen_shard(named.__getitem__),
        )  # fmt: skip

    @property
    def shares_updates(self) -> bool:
        """Whether other ranks update parts of the shard that this rank keeps."""
        return self.shard.elements > 0 and updates_per_shard(self.shard.part.plan) > 1

    def averaged(self, averaging: Averaging, groups: ProcessGroups) -> Tensor:
        """A shard of averaged weights, `[param_shard_elements]`."""
        shard, flat = self.shard, self.working.detach().clone()
        part = flat[shard.optim_shard_begin - shard.param_shard_begin :]
        for segment, weight in zip(shard.segments, self.parameters, strict=True):
            part[segment.shard_slice] = weight.averaged(averaging).detach().view(-1)
        if self.shares_updates:
            part = part[: shard.optim_shard_elements]
            groups.all_gather_initial_params(flat, part, shard.part)
        return flat
