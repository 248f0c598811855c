"""StepState: the tensors that one rank holds between the instructions of a step."""

from dataclasses import dataclass, field

from torch import Tensor

from windlass.runtime.split_backward import DeferredWeightGrad

_Key = tuple[int, int]
"""Layer and micro-batch."""


@dataclass(slots=True)
class StepState:
    """Activations, gradients and losses of one step on one rank."""

    tokens: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Inputs and targets, by micro-batch."""
    dropout_keys: dict[int, Tensor] = field(default_factory=dict)
    """Dropout keys of the samples, by micro-batch."""
    outputs: dict[_Key, Tensor] = field(default_factory=dict)
    """Layer outputs, which the next layer takes as input."""
    autograd_graphs: dict[_Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output of a layer, connected by the autograd graph."""
    gradients: dict[_Key, Tensor] = field(default_factory=dict)
    """Gradients of layer outputs, as the next layer's backward pass leaves them."""
    deferred_weight_grads: dict[_Key, DeferredWeightGrad] = field(default_factory=dict)
    """Results of the input-gradient pass that the weight-gradient pass still needs."""
    block_scores: dict[int, list[Tensor]] = field(default_factory=dict)
    """Sums of scores of absent blocks over micro-batches, by layer; one for each sparse module."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses, by micro-batch."""
