"""Weights that are laid out flat: parameters and gradients as views, and who shares them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from windlass.models import ExpertParallelRank
from windlass.program import EXPERT_USES, CollectiveUse, DataUse, MeshCoord, expert_sharding
from windlass.runtime.parameters import ModelParameter
from windlass.schema import Plan

_OWN_USES: Mapping[DataUse, CollectiveUse] = {
    "gather": "gather", "update": "update", "scatter": "scatter", "reduce": "reduce",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Weights of each layer that the same replicas share."""

    plan: Plan
    """The plan as these weights see it."""
    data_rank: int
    """Number of this rank among the replicas that hold the same weights."""
    uses: Mapping[DataUse, CollectiveUse]
    """The communicators of these replicas."""
    experts: ExpertParallelRank | None = None
    """Whose experts they are; None for weights that every replica holds."""

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is among the first that hold all of the optimizer state together."""
        return self.data_rank < self.plan.sharding.optimizer


def weight_parts(
    plan: Plan, coord: MeshCoord, experts: ExpertParallelRank
) -> tuple[WeightPart, ...]:
    """The parts that the weights of a layer fall into: experts apart where ranks divide them."""
    own = WeightPart(plan=plan, data_rank=coord.data_rank, uses=_OWN_USES)
    if experts.degree == 1:
        return (own,)
    divided = WeightPart(
        plan=expert_sharding(plan), data_rank=coord.data_rank // experts.degree,
        uses=EXPERT_USES, experts=experts,
    )  # fmt: skip
    return own, divided


@dataclass(slots=True, kw_only=True, eq=False)
class FlatParameter(ModelParameter):
    """A parameter whose values are a part of its flat layer."""

    flat_offset: int
    """Its first element in the flat layer, or in the flat frozen part of it."""

    @property
    def flat_slice(self) -> slice:
        """Its elements in the flat layer."""
        return slice(self.flat_offset, self.flat_offset + self.shape.numel())


@dataclass(slots=True, kw_only=True, eq=False)
class FlatGradParameter(FlatParameter):
    """A parameter whose gradient is a view into its layer's flat gradient buffer."""

    takes_over: ClassVar[bool] = False
    grads: "FlatGradBuffer"
    """The gradient buffer of its layer."""

    def new_gradient(self, dtype: torch.dtype) -> Tensor:
        """The first gradient of a step, a view into the flat one, for the caller to fill."""
        del dtype
        self.gradient = self.grads.get()[self.flat_slice].view(self.shape)
        return self.gradient

    def _set_first_gradient(self, gradient: Tensor) -> None:
        self.new_gradient(gradient.dtype).copy_(gradient)


class FlatGradBuffer:
    """The flat gradient of one layer, allocated when a gradient is first added.

    It is never cleared: the first gradient of each parameter overwrites what was there.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._elements, self._dtype, self._device = elements, dtype, device
        self._flat: Tensor | None = None

    def get(self) -> Tensor:
        """The buffer `[elements]`; undefined values where no gradient was added."""
        if self._flat is None:
            self._flat = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        return self._flat

    def take(self) -> Tensor:
        """The buffer `[elements]`, handed over to the caller."""
        flat, self._flat = self.get(), None
        return flat

    def discard(self) -> None:
        """Frees the buffer."""
        self._flat = None


class Segment(NamedTuple):
    """A weight, or a piece of one, within the part of the flat layer that this rank updates."""

    name: str
    """Full name of the weight."""
    weight_offset: int
    """Its first element in this tensor-parallel rank's part of the weight."""
    shard_offset: int
    """Its first element in the part that this rank updates."""
    shape: torch.Size
    decays: bool
    """Whether weight decay applies."""
    matrix: bool
    """Whether the optimizer updates it as a matrix; so it does a piece of one."""

    @property
    def shard_slice(self) -> slice:
        """Its elements in the part that this rank updates."""
        return slice(self.shard_offset, self.shard_offset + self.shape.numel())
