"""What an optimizer keeps of each weight beside the weight itself.

    ema            an average kept beside each weight; after each update
                   a <- share a + (1 - share) w
    schedule-free  x = (w - (1 - share) z) / share, where z is the optimizer's first moment and the
                   trained weight w lies between both: w = share x + (1 - share) z

Sources: Polyak & Juditsky 1992 and, with this decay, Tarvainen & Valpola 2017, arXiv:1703.01780;
Defazio et al. 2024, arXiv:2405.15682, equation 5.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from windlass.document import Document
from windlass.runtime.optimizer_state.factored_moment import FactoredMoment, Ranges
from windlass.schema import (
    MomentFormat,
    OptimizerLaw,
    Plan,
    Precision,
    TrainSettings,
    optimizer_law,
)
from windlass.torch_ext import StoredMoment

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "float8": torch.bfloat16,
    "float64": torch.float64,
}  # fmt: skip


def grad_accum_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which gradients of a step's micro-batches are accumulated."""
    working = DTYPES[plan.precision]
    return wide_dtype(working) if plan.batch.accumulation > 1 else working


def master_dtype(precision: Precision) -> torch.dtype:
    """The dtype of master weights, accumulated gradients and unquantized moments."""
    return wide_dtype(DTYPES[precision])


def stored_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which a plan keeps weights between updates."""
    keeps_masters = plan.master_weights is None
    return master_dtype(plan.precision) if keeps_masters else DTYPES[plan.precision]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of another one are summed: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class StateFormat(NamedTuple):
    """What an optimizer keeps of each weight."""

    law: OptimizerLaw
    """How many moments."""
    moments: MomentFormat = "float32"
    """Their storage format."""
    average: bool = False
    """Whether an average of the weight is kept beside it, at least in float32."""
    has_masters: bool = True
    """Whether weights are kept in float32 at least; else in what layers compute in."""

    def new_moments(self, master: Tensor, *, matrix: bool) -> tuple[StoredMoment, ...]:
        """The moments of a weight before its first update, each in its shape."""
        shape, device = tuple(master.shape), master.device
        moments = tuple(
            StoredMoment.zeros(self.moments, which, shape, device)
            for which in range(self.law.moments_of(matrix=matrix))
        )
        if master.dtype == torch.float64:
            moments = tuple(StoredMoment(moment.values.double()) for moment in moments)
        if self.law.averages:
            moments[0].values.copy_(master.detach())
        return moments

    def new_factors(
        self, shape: tuple[int, ...], like: Tensor, ranges: Ranges | None = None
    ) -> FactoredMoment | None:
        """The second moment of a weight by rows and columns before its first update.

        None if it is kept element by element, or not at all.

        Args:
            ranges: what a tensor-parallel rank has of it; None for all.
        """
        if not self.law.factors(shape):
            return None
        return FactoredMoment.zeros(shape, like, ranges)

    def new_average(self, master: Tensor) -> Tensor | None:
        """The average of a weight before its first update: the weight; None if none is kept."""
        if not self.average:
            return None
        wide = torch.promote_types(master.dtype, torch.float32)
        return master.detach().to(wide, copy=True)


def state_format(plan: Plan) -> StateFormat:
    """What the optimizer of a plan keeps of each weight."""
    law, has_masters = optimizer_law(plan.optimizer), plan.master_weights is None
    return StateFormat(law, plan.moments, plan.ema is not None, has_masters)


class Averaging(Document):
    """How averages of the weights follow from a run's state."""

    kind: Literal["ema", "schedule-free"]
    share: float
    """Share of the average that remains after each step; of the average in the trained weights."""

    @property
    def is_kept(self) -> bool:
        """Whether the average is a tensor of its own beside each weight."""
        return self.kind == "ema"

    def value(self, weight: Tensor, kept: Tensor) -> Tensor:
        """The averaged weight, which may be `kept` itself."""
        return kept if self.is_kept else torch.lerp(weight, kept, 1 - 1 / self.share)

    def add(self, averages: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Adds weights that were just updated to the averages beside them, in place."""
        pairs = zip(averages, weights, strict=True)
        wide = [weight.to(average.dtype) for average, weight in pairs]
        torch._foreach_lerp_(list(averages), wide, 1 - self.share)


def averaging_of(settings: TrainSettings) -> Averaging | None:
    """What a run averages; None if its evaluations read the trained weights."""
    if settings.ema is not None:
        return Averaging(kind="ema", share=settings.ema)
    if optimizer_law(settings.optimizer).averages:
        return Averaging(kind="schedule-free", share=settings.betas[0])
    return None
