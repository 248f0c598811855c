"""LayerUpdate: one optimizer step for an offloaded layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from windlass.runtime.optimizers.optimizer import ParameterPart

UpdatePass = Callable[[ParameterPart], None]
"""One pass of an optimizer step, for a part of one parameter, in place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerUpdate:
    """One optimizer step for a layer, as the store asks for it."""

    passes: Sequence[UpdatePass]
    """The optimizer: one pass over all parts, or several."""
    reads_gradient: Sequence[bool]
    """Whether each pass reads gradients."""
    weights: Sequence[Tensor]
    """The copies of the weights that the layer computes with; overwritten by the update."""
    gradients: Sequence[Tensor | None] | None
    """The gradient of each weight; None if `write_grads` has offloaded them."""
    has_gradient: Sequence[bool]
    """Whether each weight has a gradient."""
    working_memory: Tensor | None
    """The buffer that holds `weights`, to be written back; None if they stay in device memory."""
