"""The weights of offloaded layers: which are in device memory, and which are not."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windlass.models import LayerStack, materialize_layer
from windlass.program import Program, layers_of_stage
from windlass.runtime.offload.transfer_queue import TransferHandle
from windlass.runtime.parameters import (
    NOT_LOADED,
    LayerParameters,
    ModelParameter,
    persistent_buffers,
)
from windlass.runtime.rank_context import RankContext
from windlass.schema import Plan


class LoadedLayer(NamedTuple):
    """A layer's weights that are in device memory, or on their way."""

    memory: Tensor
    """The buffer that holds them, `UInt8[n]`."""
    transfer: TransferHandle
    """The transfer or update that fills it."""


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


def with_buffers(context: RankContext, index: int) -> nn.Module:
    """A layer with real buffers, which are small and stay in device memory."""
    layer = context.stack.layers[index]
    if not any(True for _ in layer.buffers()):
        return layer
    device = str(context.device.torch_device)
    return materialize_layer(context.stack, index, seed=context.seed, device=device)


def owners_of_weights(layers: Sequence[LayerParameters]) -> tuple[list[int], ...]:
    """For each layer, the layers of this stage that own the weights it computes with."""
    owner = {
        weight.name: index
        for index, layer in enumerate(layers)
        for weight in (*layer.owned, *layer.frozen)
    }
    return tuple(
        sorted({owner[weight.name] for weight in layer.used if weight.name in owner})
        for layer in layers
    )


def shapes_of(weights: Sequence[ModelParameter]) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by its full name."""
    return {weight.name: tuple(weight.shape) for weight in weights}


def set_weights_aside(layers: Sequence[LayerParameters]) -> Callable[[], None]:
    """Returns what brings the weights back with which layers compute now."""
    weights = [weight for layer in layers for weight in (*layer.owned, *layer.frozen)]
    working = [weight.working for weight in weights]

    def bring_back() -> None:
        for weight, values in zip(weights, working, strict=True):
            weight.working = values

    return bring_back


def owners_between_steps(
    plan: Plan, stage: int, weight_layers: Sequence[Sequence[int]]
) -> frozenset[int]:
    """The layers whose weights a stage has between steps: all that it uses, or its first phase.

    Args:
        plan: the plan.
        stage: the stage.
        weight_layers: for each layer, the layers that own the weights it computes with.
    """
    if plan.is_offloaded("parameters"):
        layers: Sequence[int] = range(*plan.stages[stage].phases[0])
    else:
        layers = layers_of_stage(plan, stage)
    return frozenset(owner for layer in layers for owner in weight_layers[layer])


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors without those that are None."""
    return [tensor for tensor in tensors if tensor is not None]


def grad_layers(program: Program) -> frozenset[int]:
    """The layers whose gradients are offloaded until their update."""
    instructions = program.instructions
    offloaded = (layer for kind, layer, _ in instructions if kind == "offload_grads")
    return frozenset(layer for layer in offloaded if layer is not None)


def take_gradients(weights: Sequence[ModelParameter]) -> list[Tensor | None]:
    """The gradients of weights, handed over."""
    gradients = [weight.gradient for weight in weights]
    for weight in weights:
        weight.clear_gradient()
    return gradients
