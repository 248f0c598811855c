"""What an optimizer keeps of each weight beside the weight itself."""

from typing import NamedTuple

import torch
from torch import Tensor

from windlass.runtime.optimizer_state.factored_moment import FactoredMoment, Ranges
from windlass.schema import MomentFormat, OptimizerLaw, Plan, optimizer_law
from windlass.torch_ext import StoredMoment


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
