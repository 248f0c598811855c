"""ComputeHandlers: the handlers that compute one step: forward, backward, norm and update."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from windlass.data import TrainingBatches
from windlass.program import Program, selective_layers
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.expert_load import ExpertLoad
from windlass.runtime.interpreter import Handlers
from windlass.runtime.keyed_dropout import DropoutKeys, generator_seed, layer_key
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.offload.activations import ActivationOffloader
from windlass.runtime.optimizer_state.optimizer_state import wide_dtype
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.parameters import ModelParameter
from windlass.runtime.rank_context import RankContext
from windlass.runtime.step.step_inputs import StepInputs
from windlass.runtime.step.step_state import StepState, backward_input, backward_weight
from windlass.runtime.step_outcome import StepOutcome
from windlass.torch_ext import Device

_COMPILED_KINDS = ("load_batch", "forward", "recompute", "backward")
"""Instruction kinds that `warm_up` runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReach:
    """Which layers of a rank have a backward pass, and what their last passes free."""

    forward_only: frozenset[int]
    """The layers before the first trained one: they save nothing, and their input is freed."""
    recomputed: frozenset[int]
    """The layers whose forward pass runs again right before their backward pass."""
    first_trained: int | None
    """The first trained layer, whose input has no gradient; None if it is on another rank."""
    frees_tokens: int | None
    """The layer whose last pass is the last to need a micro-batch's tokens; None if none does."""

    @classmethod
    def of(cls, program: Program, last_layer: int) -> Self:
        """The reach of a program."""
        passes: dict[str, set[int]] = defaultdict(set)
        for kind, layer, _ in program.instructions:
            if layer is not None:
                passes[kind].add(layer)
        forward, backward = passes["forward"], passes["backward"] | passes["backward_weight"]
        first = min(backward, default=None)
        if first is not None and first - 1 in passes["send"]:
            first = None
        takes_tokens = forward & {0, last_layer}
        return cls(
            forward_only=frozenset(forward - backward),
            recomputed=frozenset(passes["recompute"]),
            first_trained=first,
            frees_tokens=min(takes_tokens & backward or takes_tokens, default=None),
        )


class StopRequested(Exception):  # noqa: N818  a request, not an error
    """The user asked to stop; no weight has changed in this step."""


class ComputeHandlers:
    """The compute handlers of one rank, with the tensors they hold while a step runs.

    Args:
        stop: asked before each micro-batch; with several ranks, at the end of a step.
        activations: offloads layer outputs; None if they stay in device memory.
    """

    def __init__(
        self,
        context: RankContext,
        store: ParamStore,
        templates: tuple[LayerTemplate, ...],
        *,
        optimizer: Optimizer,
        batches: TrainingBatches,
        stop: Callable[[], bool],
        dist: DistContext,
        activations: ActivationOffloader | None = None,
    ) -> None:
        plan, program, device = context.plan, context.program, context.device.torch_device
        self.inputs = StepInputs(context, batches, dist.coord.data_rank, dist.context)
        """What each step takes from the host."""
        self._accumulates = plan.batch.accumulation > 1
        self._store = store
        self._activations = activations
        self.layers = layers = store.layers
        """The parameters that each layer computes with."""
        self._templates = templates
        self._last = len(layers) - 1
        self._dist = dist
        self._optimizer = optimizer
        self._seed = context.seed
        self._stop = stop
        self._reach = BackwardReach.of(program, self._last)
        self.no_grad_layers = self._reach.forward_only.union(
            layer for layer in self._reach.recomputed if not templates[layer].compiled
        )
        """Layers whose first forward pass runs without autograd. Recomputed layers that are
        compiled are excluded: without autograd torch compiles other code, which fuses and so
        rounds differently. Their autograd graph is built and dropped instead."""
        self._selective = selective_layers(plan)
        self._first_micro_batch = tuple(
            i for i in program.instructions if i.micro_batch == 0 and i.kind in _COMPILED_KINDS
        )
        self._active = torch.ones((), dtype=torch.int64, device=device)
        self._warms_up = False
        computed = frozenset(i.layer for i in program.instructions if i.kind == "forward")
        counts = dist.coord.tensor_rank == 0
        self.experts = ExpertLoad(layers, templates, computed, context.device, counts=counts)
        """Which experts the tokens of the step took."""
        self.outcome = StepOutcome(
            context, store, optimizer, inputs=self.inputs, batches=batches, experts=self.experts,
            stop=stop, dist=dist,
        )  # fmt: skip
        """Loss and norm of the step, and whether it updates weights."""
        self._layer_keys = [layer_key(layer.name).to(device) for layer in layers]
        self.begin_step(1)

    def begin_step(self, step: int) -> None:
        """Drops everything of the previous step and begins `step`, counted from 1."""
        self._store.begin_step(step)
        self.inputs.begin_step(step, self.outcome.scale)
        self._optimizer.numbers.begin_step(step)
        if self._activations is not None:
            self._activations.begin_step()
        self.state = StepState()
        self.outcome.begin_step()
        self.experts.begin_step()
        for layer in self.layers:
            for weight in (*layer.owned, *layer.used):
                weight.clear_gradient()

    def fix_addresses(self) -> None:
        """From now on each step finds its inputs and the numbers of its update in one place."""
        self.inputs.fix_addresses()
        self._optimizer.numbers.fix_addresses(
            weight.name for layer in self.layers for weight in layer.owned
        )

    def load_all(self) -> None:
        """Brings the inputs of all micro-batches of the step to the device.

        Raises:
            StopRequested: the user asked to stop.
        """
        self._require_no_stop()
        self.inputs.load_all(
            keys=any(template.has_dropout for template in self._templates),
            documents=any(template.takes_documents for template in self._templates),
        )

    def close(self) -> None:
        """Ends the thread that reads micro-batches."""
        self.inputs.close()

    def warm_up(self, step: int) -> None:
        """Runs the passes of one micro-batch and discards them, so that all code is compiled."""
        self.begin_step(step)
        self._warms_up = True
        handlers = self.handlers()
        for kind, layer, micro in self._first_micro_batch:
            if layer is not None:
                self._store.load_layers((layer,))
            handlers[kind](layer or 0, micro or 0)
            recomputed = kind == "forward" and layer in self._reach.recomputed
            is_last = kind == "backward" or recomputed or layer in self._reach.forward_only
            if layer is not None and is_last:
                self._store.free_layers((layer,))
        self._warms_up = False
        self.begin_step(step)

    def handlers(self) -> Handlers:
        """The handler of each instruction kind that needs no other pipeline stage."""
        return {
            "load_batch": self._load_batch,
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
            "grad_norm": self._grad_norm,
            "update": self._update,
            "sync": self._sync,
            **self._store.handlers(),
            **({} if self._activations is None else self._offload_handlers(self._activations)),
        }

    def _offload_handlers(self, activations: ActivationOffloader) -> Handlers:
        def offload(layer: int, micro: int) -> None:
            activations.offload(layer, micro, self.state.outputs.pop((layer, micro)))

        def reload(layer: int, micro: int) -> None:
            self.state.outputs[layer, micro] = activations.reload(layer, micro)

        return {"offload_activation": offload, "reload_activation": reload}

    def _load_batch(self, _: int, micro: int) -> None:
        if not self.inputs.has_loaded(micro):
            self._require_no_stop()
        self.state.tokens[micro] = self.inputs.tokens(micro)

    def _require_no_stop(self) -> None:
        if self._dist.world_size == 1 and self._stop():
            raise StopRequested

    def _forward(self, layer: int, micro: int) -> None:
        if layer in self.no_grad_layers:
            with torch.no_grad():
                output = self._call(layer, micro, self._input(layer, micro))
            self.state.outputs[layer, micro] = output
            if layer in self._reach.forward_only:
                self._free_input(layer, micro)
            return
        output = self._forward_with_grad(layer, micro)
        if layer in self._reach.recomputed:
            del self.state.autograd_graphs[layer, micro]
        if layer == self._last:
            self.state.losses[micro] = output.detach()
        else:
            self.state.outputs[layer, micro] = output.detach()

    def _recompute(self, layer: int, micro: int) -> None:
        self._forward_with_grad(layer, micro, repeats=True)

    def _backward(self, layer: int, micro: int) -> None:
        x, output = self.state.autograd_graphs.pop((layer, micro))
        trained = self.layers[layer].trained
        wanted = self._leaves(layer)
        gradient = self._output_gradient(layer, micro)
        self._free_input(layer, micro)
        if layer != self._reach.first_trained:
            wanted.append(x)
        gradients: list[Tensor | None] = list(
            torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        )
        # Memory peaks here, so nothing of the forward pass may outlive its backward pass.
        del x, output, gradient, wanted
        if layer != self._reach.first_trained:
            self._pass_to_previous(layer, micro, gradients.pop())
        self.state.add_scores(layer, gradients[len(trained) :])
        del gradients[len(trained) :]
        add_gradients(trained, gradients, accumulated=self._accumulates)

    def _backward_input(self, layer: int, micro: int) -> None:
        if layer == self._reach.first_trained:
            return  # its input needs no gradient: the weight-gradient pass does all
        x, output = self.state.autograd_graphs[layer, micro]
        gradient = self._output_gradient(layer, micro)
        input_gradient, deferred = backward_input(x, output, gradient, self._leaves(layer))
        self.state.deferred_weight_grads[layer, micro] = deferred
        self._pass_to_previous(layer, micro, input_gradient)

    def _backward_weight(self, layer: int, micro: int) -> None:
        if layer == self._reach.first_trained:
            self._backward(layer, micro)
            return
        del self.state.autograd_graphs[layer, micro]
        self._free_input(layer, micro)
        trained = self.layers[layer].trained
        deferred = self.state.deferred_weight_grads.pop((layer, micro))
        gradients = backward_weight(self._leaves(layer), deferred)
        self.state.add_scores(layer, gradients[len(trained) :])
        del gradients[len(trained) :]
        add_gradients(trained, gradients, accumulated=self._accumulates)

    def _leaves(self, layer: int) -> list[Tensor]:
        """The trained weights of a layer, and what gives the scores of absent blocks."""
        weights = [weight.working for weight in self.layers[layer].trained]
        return [*weights, *self._templates[layer].score_leaves]

    def _output_gradient(self, layer: int, micro: int) -> Tensor:
        if layer == self._last:
            return self.inputs.loss_weights[micro]
        return self.state.gradients.pop((layer, micro))

    def _free_input(self, layer: int, micro: int) -> None:
        """Frees what only the last pass of a layer still needed."""
        if layer > 0:
            del self.state.outputs[layer - 1, micro]
        if layer == self._reach.frees_tokens:
            del self.state.tokens[micro]

    def _pass_to_previous(self, layer: int, micro: int, gradient: Tensor | None) -> None:
        """Stores the gradient of a layer's input for the previous layer."""
        if gradient is not None:
            self.state.gradients[layer - 1, micro] = gradient

    def _grad_norm(self, _: int, __: int) -> None:
        self.outcome.measure(self.state)
        self.outcome.decide(self.state)

    def _update(self, layer: int, _: int) -> None:
        self.outcome.update(self.state, layer)

    def _sync(self, _: int, __: int) -> None:
        self.outcome.sync(self.state)

    def _input(self, layer: int, micro: int) -> Tensor:
        if layer == 0:
            return self.state.tokens[micro][0]
        if self._activations is not None:
            self._activations.wait_for(layer - 1, micro)
        return self.state.outputs[layer - 1, micro]

    def _forward_with_grad(self, layer: int, micro: int, *, repeats: bool = False) -> Tensor:
        """The output of a forward pass that builds the autograd graph for its backward pass."""
        x = self._input(layer, micro)
        # Compiled layers share their code, so that the first trained one has that of the others.
        is_first = layer == self._reach.first_trained and not self._templates[layer].compiled
        if layer > 0 and not is_first:
            x = x.detach().requires_grad_()
        output = self._call(layer, micro, x, repeats=repeats)
        self.state.autograd_graphs[layer, micro] = (x, output)
        return output

    def _call(self, layer: int, micro: int, x: Tensor, *, repeats: bool = False) -> Tensor:
        """The output of a layer; running statistics count a pass that repeats another one once."""
        self._store.wait_for_layer(layer)
        tensors, template = self.layers[layer], self._templates[layer]
        targets = self.state.tokens[micro][1] if layer == self._last else None
        keys = None
        if template.has_dropout:
            keys = DropoutKeys(
                samples=self.inputs.sample_keys(micro), layer=self._layer_keys[layer],
                active=self._active,
            )  # fmt: skip
        seed = generator_seed(
            self._seed, self.inputs.step, layer, self.inputs.micro_batch_start(micro)
        )
        buffers = tensors.buffers
        if template.has_running_statistics and (repeats or self._warms_up):
            buffers = template.discarded_buffers(buffers)
        documents = self.inputs.documents(micro) if template.takes_documents else None
        balance = self.inputs.balance if template.takes_balance else None
        return template(
            tensors.weights, buffers, keys, x, targets, documents, balance, seed=seed,
            selective=layer in self._selective,
        )  # fmt: skip


def add_gradients(
    weights: Sequence[ModelParameter], gradients: list[Tensor | None], *, accumulated: bool
) -> None:
    """Adds the gradients of a micro-batch to those of a layer's weights.

    On an accelerator a few calls convert, copy and add those of small weights together.

    Args:
        gradients: in the same order, handed over; None for a weight that the layer did not use.
        accumulated: whether several micro-batches are accumulated, which happens in float32.
    """
    copied: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    elements = 0
    taken: set[int] = set()
    for weight in reversed(weights):
        gradient = gradients.pop()
        if gradient is None:
            continue
        elements += gradient.numel()
        wide = wide_dtype(gradient.dtype) if accumulated else gradient.dtype
        takes_over = weight.gradient is None and weight.takes_over and gradient.dtype == wide
        if takes_over and type(gradient) is Tensor and gradient.layout == torch.strided:
            # Where nothing is summed over (one sample, to which two weights are added), autograd
            # gives both the same memory: one that is added to would change the other.
            memory = gradient.untyped_storage().data_ptr()
            gradient = gradient.clone() if memory in taken else gradient
            taken.add(memory)
        is_small = elements <= Device.piece_elements and not gradient.is_sparse
        if gradient.is_cpu or takes_over or not is_small:
            weight.add_gradient(gradient, accumulated=accumulated)
        elif weight.gradient is None:
            copied.append((weight.new_gradient(wide), gradient))
        else:
            if gradient.dtype != wide:
                copied.append((torch.empty_like(gradient, dtype=wide), gradient))
                gradient = copied[-1][0]
            added.append((weight.gradient, gradient))
    if copied:
        torch._foreach_copy_([to for to, _ in copied], [of for _, of in copied])
    if added:
        torch._foreach_add_([to for to, _ in added], [of for _, of in added])
