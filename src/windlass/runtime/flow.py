"""Flow: what a step holds of its micro-batches between instructions."""

from dataclasses import dataclass, field

from torch import Tensor

from windlass.runtime.parted import Inner

_At = tuple[int, int]
"""Layer and micro-batch."""


@dataclass(slots=True)
class Flow:
    """The values of one step on one device."""

    tokens: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Inputs and targets, by micro-batch."""
    samples: dict[int, Tensor] = field(default_factory=dict)
    """Keys of what is dropped, by micro-batch."""
    outputs: dict[_At, Tensor] = field(default_factory=dict)
    """Of layers, as the next layer takes them."""
    kept: dict[_At, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output with what autograd keeps between them."""
    gradients: dict[_At, Tensor] = field(default_factory=dict)
    """Of outputs: what the next layer's backward passes down."""
    inner: dict[_At, Inner] = field(default_factory=dict)
    """What the input's part of a backward pass leaves for the weights' part."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By micro-batch."""
