"""Messages between pipeline stages: activations, tied weights, and the gradients of both."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from windlass.models import LayerStack
from windlass.program import (
    Instruction,
    InstructionKind,
    StageTensors,
    TiedWeights,
    stages_by_layer,
)
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.interpreter import Handler
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.optimizer_state.optimizer_state import DTYPES, grad_accum_dtype
from windlass.runtime.parameters import NOT_LOADED, LayerParameters, ModelParameter
from windlass.runtime.rank_context import RankContext
from windlass.runtime.step.step_state import StepState
from windlass.schema import Plan


class LoadedLayers(Protocol):
    """A rank's weights, as far as messages carry them."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """The parameters that each layer computes with."""

    def wait_for_layer(self, layer: int) -> None:
        """Blocks until all weights that a layer computes with are in device memory."""


class P2PCommunicator:
    """The handlers of messages between stages."""

    def __init__(
        self,
        context: RankContext,
        groups: ProcessGroups,
        store: LoadedLayers,
        templates: Sequence[LayerTemplate],
    ) -> None:
        plan = context.plan
        self._plan, self._groups, self._device = plan, groups, context.device.torch_device
        self._wait_for_layer = store.wait_for_layer
        self._stage = StageTensors(plan, groups.graph, groups.coord.stage)
        shapes = output_shapes(templates, batch_on_meta(context))
        self._shapes = {layer: shapes[layer] for layer in self._stage.boundaries}
        by_name = {
            weight.name: weight for layer in store.layers for weight in (*layer.owned, *layer.used)
        }
        ties = (*self._stage.tied_as_owner.items(), *self._stage.tied_as_user.items())
        self._tied = {
            layer: [by_name[name] for name in tied_weight_names(context.stack, tie, plan)]
            for layer, tie in ties
        }
        self.step_state = StepState()
        """State of the step that runs."""

    def handlers(self) -> Mapping[InstructionKind, Handler]:
        """The handler of each kind of message."""
        return {
            "send": self._send,
            "receive": self._receive,
            "send_tied_weights": self._send_tied_weights,
            "recv_tied_weights": self._recv_tied_weights,
            "send_tied_grads": self._send_tied_grads,
            "accumulate_tied_grads": self._accumulate_tied_grads,
        }

    def recv_tied_weights(self, phase: tuple[int, int]) -> None:
        """Receives the tied weights that a phase uses, for a forward pass outside of a step."""
        for layer in self._stage.tied_as_user:
            if phase[0] <= layer < phase[1]:
                self._recv_tied_weights(layer, 0)

    def send_tied_weights(self, phase: tuple[int, int]) -> None:
        """Sends the tied weights that a phase owns, for a forward pass outside of a step."""
        for layer, tie in self._stage.tied_as_owner.items():
            if phase[0] <= tie.owner_layer < phase[1]:
                self._send_tied_weights(layer, 0)

    def free_tied_weights(self) -> None:
        """Frees the tied weights received from other stages."""
        for layer in self._stage.tied_as_user:
            for weight in self._tied[layer]:
                weight.working = NOT_LOADED

    def receive_activation(self, layer: int, block: int, shape: torch.Size | None = None) -> Tensor:
        """The output of a layer of the previous stage, for a forward pass outside of a step.

        Args:
            shape: shape of the output; None means that of a micro-batch.
        """
        shape = self._shapes[layer] if shape is None else shape
        into = self._empty(shape, DTYPES[self._plan.precision])
        return self._groups.receive(Instruction("receive", layer, block), into)

    def send_activation(self, layer: int, block: int, output: Tensor) -> None:
        """Sends the output of this stage's last layer to the next stage."""
        self.step_state.outputs[layer, block] = output
        self._send(layer, block)

    def crosses_stages(self, layer: int) -> bool:
        """Whether a layer's output goes to or from this stage."""
        return layer in self._stage.boundaries

    def _send(self, layer: int, micro: int) -> None:
        state = self.step_state
        values = state.outputs if layer in self._stage.layer_set else state.gradients
        self._groups.send(Instruction("send", layer, micro), values.pop((layer, micro)))

    def _receive(self, layer: int, micro: int) -> None:
        state = self.step_state
        values = state.gradients if layer in self._stage.layer_set else state.outputs
        into = self._empty(self._shapes[layer], DTYPES[self._plan.precision])
        values[layer, micro] = self._groups.receive(Instruction("receive", layer, micro), into)

    def _send_tied_weights(self, layer: int, _: int) -> None:
        self._wait_for_layer(self._stage.tied_as_owner[layer].owner_layer)
        tensors = [weight.working.detach() for weight in self._tied[layer]]
        self._groups.send(Instruction("send_tied_weights", layer), _flatten(tensors))

    def _recv_tied_weights(self, layer: int, _: int) -> None:
        dtype, weights = DTYPES[self._plan.precision], self._tied[layer]
        flat = self._receive_flat(Instruction("recv_tied_weights", layer), dtype, weights)
        for weight, part in zip(weights, _split(flat, weights), strict=True):
            weight.working = part.requires_grad_(not weight.frozen)

    def _send_tied_grads(self, layer: int, _: int) -> None:
        dtype = grad_accum_dtype(self._plan)
        gradients: list[Tensor] = []
        for weight in self._trained(layer):
            weight.flush_sparse_gradient()
            gradient = weight.gradient
            if gradient is None:
                gradient = torch.zeros_like(weight.working, dtype=dtype)
            gradients.append(gradient)
        if gradients:
            self._groups.send(Instruction("send_tied_grads", layer), _flatten(gradients))
        for weight in self._tied[layer]:
            weight.clear_gradient()
            weight.working = NOT_LOADED

    def _accumulate_tied_grads(self, layer: int, _: int) -> None:
        if not (weights := self._trained(layer)):
            return  # frozen weights have no gradient
        dtype = grad_accum_dtype(self._plan)
        flat = self._receive_flat(Instruction("accumulate_tied_grads", layer), dtype, weights)
        for weight, part in zip(weights, _split(flat, weights), strict=True):
            weight.add_gradient(part, accumulated=self._plan.batch.accumulation > 1)

    def _trained(self, layer: int) -> list[ModelParameter]:
        """The tied weights that get a gradient."""
        return [weight for weight in self._tied[layer] if not weight.frozen]

    def _receive_flat(
        self, instruction: Instruction, dtype: torch.dtype, weights: Sequence[ModelParameter]
    ) -> Tensor:
        # `TiedWeights.elements` counts the rows of tensor-parallel rank 0; with an uneven
        # vocabulary other ranks have fewer, so the elements are counted here.
        elements = sum(weight.shape.numel() for weight in weights)
        return self._groups.receive(instruction, self._empty((elements,), dtype))

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


def tied_weight_names(stack: LayerStack, tie: TiedWeights, plan: Plan) -> tuple[str, ...]:
    """Full names of the owner's weights that a stage shares, in the order of their message."""
    names = [
        owner
        for tied, owner in stack.tied_weights.items()
        if owner.startswith(f"{stack.names[tie.owner_layer]}.")
        and _stage_of(stack, tied, plan) == tie.user_stage
    ]
    return tuple(dict.fromkeys(names))


def batch_on_meta(context: RankContext) -> Tensor:
    """A rank's inputs of a micro-batch on the meta device: tokens `Int[b s]`, or `Float[b ...]`."""
    batch, examples = context.plan.batch, context.stack.examples
    if examples is None:
        tokens = batch.sequence // (context.plan.parallel.context or 1)
        return torch.zeros(batch.micro, tokens, dtype=torch.int64, device="meta")
    return torch.empty(batch.micro, *examples.inputs, device="meta")


def output_shapes(templates: Sequence[LayerTemplate], x: Tensor) -> tuple[torch.Size, ...]:
    """The shape of each layer's output for one micro-batch, computed on the meta device.

    Args:
        x: the inputs of a micro-batch on the meta device.
    """
    cache: dict[tuple[int, torch.Size], Tensor] = {}
    shapes: list[torch.Size] = []
    for template in templates:
        key = (id(template), x.shape)
        if key not in cache:
            cache[key] = template.meta_output(x)
        x = cache[key]
        shapes.append(x.shape)
    return tuple(shapes)


def _stage_of(stack: LayerStack, weight: str, plan: Plan) -> int:
    return stages_by_layer(plan)[stack.layer_of(weight)]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, weights: Sequence[ModelParameter]) -> list[Tensor]:
    """A flat message as tensors of its weights' shapes."""
    parts = flat.split([weight.shape.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
