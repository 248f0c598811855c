"""The weights that an evaluation reads, where they are not those that are trained.

    ema            an average kept beside each weight; after each update
                   a <- share a + (1 - share) w
    schedule-free  x = (w - (1 - share) z) / share, where z is the optimizer's first moment and the
                   trained weight w lies between both: w = share x + (1 - share) z

Sources: Polyak & Juditsky 1992 and, with this decay, Tarvainen & Valpola 2017, arXiv:1703.01780;
Defazio et al. 2024, arXiv:2405.15682, equation 5.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from windlass.document import Document
from windlass.schema import TrainSettings, optimizer_law


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
