"""What each instruction does with tensors, and what is held between instructions of a step."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from windlass.data.batches import Batches
from windlass.errors import RunBroken
from windlass.program.activation_checkpointing import selected
from windlass.program.instruction import Kind, Program
from windlass.runtime.adamw import Optimizer
from windlass.runtime.distributed.process_groups import World
from windlass.runtime.interpreter import Handler
from windlass.runtime.keyed_dropout import Keys, draw_seed, layer_key, sample_keys
from windlass.runtime.layer_templates import Template
from windlass.runtime.offload.activations import Outputs
from windlass.runtime.param_store import Residence
from windlass.runtime.parameters import Parameter, master_dtype
from windlass.runtime.split_backward import Inner, input_gradient, weight_gradients
from windlass.schema.plan import Plan

_NAMED_DOCUMENTS = 8
"""How many documents a broken step's message names."""

_PASSES = ("load_batch", "forward", "recompute", "backward")
_PASSED = ("forward", True)
"""The forward pass of a layer that runs again before its backward: nothing of it is kept."""


class StopWished(Exception):  # noqa: N818  a wish, not a fault
    """The user wishes to stop; no weight has changed in this step."""


class Compute:
    """The handlers of one device, with everything they hold while a step runs.

    Args:
        plan: the plan that the program was lowered from.
        program: tells which layers run forward again before their backward.
        residence: of weights and optimizer state.
        templates: one for each layer.
        optimizer: updates weights.
        batches: gives a micro-batch's tokens.
        seed: of the dropout masks.
        device: where all tensors lie.
        stop: asked before each micro-batch; by one device among several, at the end of a step.
        world: the devices that it is one of.
        outputs: the home of outputs beyond the near tier; None where they stay.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        residence: Residence,
        templates: tuple[Template, ...],
        *,
        optimizer: Optimizer,
        batches: Batches,
        seed: int,
        device: torch.device,
        stop: Callable[[], bool],
        world: World,
        outputs: Outputs | None = None,
    ) -> None:
        self._micro = plan.batch.micro
        self.first = world.place.replica * plan.batch.replica
        """Of the samples in the global batch, the first that this replica takes."""
        self._summed = plan.batch.accumulation > 1
        self._residence = residence
        self._away = outputs
        self._layers = layers = residence.layers
        self._templates = templates
        self._last = len(layers) - 1
        self._embeds = any(i.kind == "forward" and i.layer == 0 for i in program.instructions)
        self._world = world
        self._clips = any(instruction.kind == "grad_norm" for instruction in program.instructions)
        self._optimizer = optimizer
        self._batches = batches
        self._seed = seed
        self._device = device
        self._stop = stop
        self.again = frozenset(
            i.layer for i in program.instructions if i.kind == "recompute" and i.layer is not None
        )
        """Layers that run forward again right before their backward."""
        self.bare = frozenset(layer for layer in self.again if not templates[layer].compiled)
        """Those of them whose first forward pass keeps nothing. Compiled code that keeps nothing is
        other code, which fuses and so rounds otherwise; there what it keeps is dropped."""
        self._selective = selected(plan)
        self._first_micro = tuple(
            i for i in program.instructions if i.micro == 0 and i.kind in _PASSES
        )
        micros = plan.batch.accumulation * plan.parallel.data
        self.scale = torch.tensor(1 / micros, device=device, dtype=master_dtype(plan.precision))
        """`Float[]`: what the mean over all micro-batches takes of each one's loss."""
        self._active = torch.ones((), dtype=torch.int64, device=device)
        self._layer_keys = [layer_key(layer.name).to(device) for layer in layers]
        self.begin(1)

    def begin(self, step: int) -> None:
        """Forgets the step before and begins `step`, counted from 1."""
        self.step = step
        """The step that runs, counted from 1."""
        self._residence.begin(step)
        if self._away is not None:
            self._away.begin()
        self.flow = Flow()
        self._norm: float | None = None
        self._loss = math.nan
        self.stops = False
        """Whether all devices agreed, at the step's end, to stop."""
        self._squares: list[Tensor] = []
        self._divisor: Tensor | None = None
        for layer in self._layers:
            for weight in (*layer.owned, *layer.used):
                weight.forget()

    def warm(self, step: int) -> None:
        """Runs the passes of one micro-batch for nothing, so that all code is compiled."""
        self.begin(step)
        handlers = self.handlers()
        for kind, layer, micro in self._first_micro:
            if layer is not None:
                self._residence.visit((layer,))
            handlers[kind](layer or 0, micro or 0)
            if layer is not None and (kind == "backward" or (kind, layer in self.again) == _PASSED):
                self._residence.leave((layer,))
        self.begin(step)

    def handlers(self) -> Mapping[Kind, Handler]:
        """The handler of each kind of instruction that runs on one device."""
        return {
            "load_batch": self._load,
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
            "grad_norm": self._global_norm,
            "update": self._update,
            "sync": self._sync,
            **self._residence.handlers(),
            **({} if self._away is None else self._moves(self._away)),
        }

    def _moves(self, away: Outputs) -> Mapping[Kind, Handler]:
        """The handlers of outputs that wait elsewhere."""

        def keep(layer: int, micro: int) -> None:
            away.keep(layer, micro, self.flow.outputs.pop((layer, micro)))

        def restore(layer: int, micro: int) -> None:
            self.flow.outputs[layer, micro] = away.restore(layer, micro)

        return {"offload_activation": keep, "reload_activation": restore}

    @property
    def loss(self) -> float:
        """Mean loss of the step's micro-batches on all devices, in nats a token."""
        return self._loss

    @property
    def gradient_norm(self) -> float:
        """2-norm over all gradients of the step, before clipping."""
        return math.nan if self._norm is None else self._norm

    def _load(self, _: int, micro: int) -> None:
        if self._world.devices == 1 and self._stop():
            raise StopWished
        inputs, targets = self._batches.at(self.step, self.sample(micro), self._micro)
        self.flow.tokens[micro] = (self._to_device(inputs), self._to_device(targets))

    def sample(self, micro: int) -> int:
        """The first sample of a micro-batch in the global batch."""
        return self.first + micro * self._micro

    def _to_device(self, tokens: object) -> Tensor:
        tensor = torch.as_tensor(tokens)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _forward(self, layer: int, micro: int) -> None:
        if layer in self.bare:
            with torch.no_grad():
                output = self._call(layer, micro, self._input(layer, micro))
            self.flow.outputs[layer, micro] = output
            return
        output = self._keep(layer, micro)
        if layer in self.again:
            del self.flow.kept[layer, micro]
        if layer == self._last:
            self.flow.losses[micro] = output.detach()
        else:
            self.flow.outputs[layer, micro] = output.detach()

    def _recompute(self, layer: int, micro: int) -> None:
        self._keep(layer, micro)

    def _backward(self, layer: int, micro: int) -> None:
        x, output = self.flow.kept.pop((layer, micro))
        used = self._layers[layer].used
        wanted = [weight.working for weight in used]
        gradient = self._gradient(layer, micro)
        self._forget_input(layer, micro)
        if layer > 0:
            wanted.append(x)
        found = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        # Nothing of the forward pass may outlive its backward: this is the fullest moment.
        del x, output, gradient, wanted
        if layer > 0:
            self._pass_down(layer, micro, found.pop())
        for weight in reversed(used):
            self._add(weight, found.pop())

    def _backward_input(self, layer: int, micro: int) -> None:
        if layer == 0:
            return  # nothing comes before it, and its weights' part does all
        x, output = self.flow.kept[layer, micro]
        weights = [weight.working for weight in self._layers[layer].used]
        found, inner = input_gradient(x, output, self._gradient(layer, micro), weights)
        self.flow.inner[layer, micro] = inner
        self._pass_down(layer, micro, found)

    def _backward_weight(self, layer: int, micro: int) -> None:
        if layer == 0:
            self._backward(layer, micro)
            return
        del self.flow.kept[layer, micro]
        self._forget_input(layer, micro)
        used = self._layers[layer].used
        inner = self.flow.inner.pop((layer, micro))
        found = weight_gradients([weight.working for weight in used], inner)
        for weight in used:
            self._add(weight, found.pop(0))

    def _gradient(self, layer: int, micro: int) -> Tensor:
        """Of a layer's output."""
        if layer == self._last:
            return self.scale
        return self.flow.gradients.pop((layer, micro))

    def _forget_input(self, layer: int, micro: int) -> None:
        """Lets go of what only the backward pass of a layer still needed."""
        if layer > 0:
            del self.flow.outputs[layer - 1, micro]
        if layer == 0 or (layer == self._last and not self._embeds):
            del self.flow.tokens[micro]

    def _pass_down(self, layer: int, micro: int, gradient: Tensor | None) -> None:
        """Hands the gradient of a layer's input to the layer before."""
        if gradient is not None:
            self.flow.gradients[layer - 1, micro] = gradient

    def _add(self, weight: Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            weight.add(gradient, summed=self._summed)

    def _global_norm(self, _: int, __: int) -> None:
        self._require_finite_losses()
        norms: list[Tensor] = []
        for index in range(len(self._layers)):
            gone = self._residence.norms.get(index)
            norms += self._norms(index) if gone is None else gone
        # Waits for the device, once a step: weights must not change by a broken gradient.
        self._agree(float(self._optimizer.joined(norms)))
        if not math.isfinite(self.gradient_norm):
            self._refuse_norm()
        self._divisor = self._optimizer.divisor(self.gradient_norm)
        self._residence.ends_backward(self._divisor)

    def _norms(self, layer: int) -> list[Tensor]:
        return self._optimizer.norms(self._residence.summed(layer))

    def _update(self, layer: int, _: int) -> None:
        if not self._clips:
            if not self._squares:
                self._require_finite_losses()
            self._squares.append(self._optimizer.joined(self._norms(layer)).square())
        self._residence.update(layer, self.step, self._divisor)

    def _sync(self, _: int, __: int) -> None:
        """Where nothing was clipped, devices have not agreed on anything yet."""
        if self._norm is None:
            self._require_finite_losses()
            self._agree(math.sqrt(math.fsum(float(square) for square in self._squares)))

    def _agree(self, own: float) -> None:
        """All devices agree on what the step has come to, and whether it was the last.

        Args:
            own: 2-norm of the gradients that this device updates.
        """
        # All slices have the same loss, and of each shard one copy counts.
        mine = self.flow.losses.values() if not self._world.place.slice else ()
        losses = [float(loss) for loss in mine]
        squares = own * own if self._residence.counts else 0.0
        told = (squares, math.fsum(losses), float(len(losses)), float(self._stop_wished()))
        total, loss, count, stops = self._world.total(told)
        self._norm, self._loss, self.stops = math.sqrt(total), loss / count, stops > 0

    def _stop_wished(self) -> bool:
        return self._world.devices > 1 and self._stop()

    def _input(self, layer: int, micro: int) -> Tensor:
        if layer == 0:
            return self.flow.tokens[micro][0]
        if self._away is not None:
            self._away.need(layer - 1, micro)
        return self.flow.outputs[layer - 1, micro]

    def _keep(self, layer: int, micro: int) -> Tensor:
        """The output of a forward pass that keeps what its backward needs."""
        x = self._input(layer, micro)
        if layer > 0:
            x = x.detach().requires_grad_()
        output = self._call(layer, micro, x)
        self.flow.kept[layer, micro] = (x, output)
        return output

    def _call(self, layer: int, micro: int, x: Tensor) -> Tensor:
        self._residence.need(layer)
        tensors, template = self._layers[layer], self._templates[layer]
        targets = self.flow.tokens[micro][1] if layer == self._last else None
        keys = None
        if template.draws:
            keys = Keys(
                samples=self._keys(micro), layer=self._layer_keys[layer], active=self._active
            )
        seed = draw_seed(self._seed, self.step, layer, self.sample(micro))
        return template(
            tensors.weights, tensors.buffers, keys, x, targets, seed=seed,
            selectively=layer in self._selective,
        )  # fmt: skip

    def _keys(self, micro: int) -> Tensor:
        """What tells the samples of a micro-batch from all others where something is dropped."""
        if micro not in self.flow.samples:
            keys = sample_keys(self._seed, self.step, self.sample(micro), self._micro)
            self.flow.samples[micro] = keys.to(self._device, non_blocking=True)
        return self.flow.samples[micro]

    def _require_finite_losses(self) -> None:
        for micro, loss in self.flow.losses.items():
            if not math.isfinite(float(loss)):
                first = self.sample(micro)
                samples = range(first, first + self._micro)
                raise RunBroken(
                    f"the loss is {float(loss)} at step {self.step}, micro-batch {micro}, over "
                    f"samples {first} to {first + self._micro - 1} from "
                    f"{self._documents(samples)}"
                )

    def _refuse_norm(self) -> None:
        names = [
            weight.name
            for layer in range(len(self._layers))
            for weight in self._residence.summed(layer)
            if not math.isfinite(float(self._optimizer.norm([weight])))
        ]
        samples = range(self.first, self.first + self._micro * len(self.flow.losses))
        raise RunBroken(
            f"the gradient of `{names[0]}` and {len(names) - 1} others is not finite at step "
            f"{self.step}, though its losses are, over samples from {self._documents(samples)}"
            if names
            else f"the gradient norm overflows float32 at step {self.step}"
        )

    def _documents(self, samples: Iterable[int]) -> str:
        """Names of the documents that samples of this step draw on."""
        names = list(
            dict.fromkeys(n for at in samples for n in self._batches.documents(self.step, at))
        )
        shown = ", ".join(f"`{name}`" for name in names[:_NAMED_DOCUMENTS])
        more = len(names) - _NAMED_DOCUMENTS
        return f"{shown} and {more} more" if more > 0 else shown


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
