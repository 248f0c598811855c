"""A layer whose weights are not in device memory."""

import torch
from torch import nn

from windlass.models import LayerStack
from windlass.runtime.parameters import (
    NOT_LOADED,
    LayerParameters,
    ModelParameter,
    persistent_buffers,
)


def unloaded_layer(
    stack: LayerStack, index: int, real: nn.Module, by_name: dict[str, ModelParameter]
) -> LayerParameters:
    """A layer of a stack without its weights.

    Args:
        stack: the model.
        index: index of the layer.
        real: the layer with real buffers.
        by_name: weights of the layers before, by full name; those of this one are added.
    """
    name, layer = stack.names[index], stack.layers[index]
    parameters = {f"{name}.{inner}": p for inner, p in layer.named_parameters()}
    new = {
        full: ModelParameter(
            name=full, working=NOT_LOADED, shape=torch.Size(p.shape), frozen=not p.requires_grad
        )
        for full, p in parameters.items()
        if full not in stack.tied_weights
    }
    by_name |= new
    return LayerParameters(
        name=name,
        owned=tuple(weight for weight in new.values() if not weight.frozen),
        frozen=tuple(weight for weight in new.values() if weight.frozen),
        used=tuple(by_name[stack.tied_weights.get(full, full)] for full in parameters),
        buffers=tuple(real.buffers()),
        persistent_buffers=persistent_buffers(name, real),
    )
