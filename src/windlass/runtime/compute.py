"""What each instruction does with tensors, and what is held between instructions of a step."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from windlass.data.batches import Batches
from windlass.errors import RunBroken
from windlass.program.instruction import Kind, Program
from windlass.runtime.interpret import Handler
from windlass.runtime.layers import Template
from windlass.runtime.optimizer import Optimizer
from windlass.runtime.outputs import Outputs
from windlass.runtime.random import Keys, draw_seed, layer_key, sample_keys
from windlass.runtime.residence import Residence
from windlass.runtime.tensors import LayerParameters
from windlass.spec.plan import Plan

_NAMED_DOCUMENTS = 8
"""How many documents a broken step's message names."""

_PASSES = ("load", "forward", "recompute", "backward")
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
        stop: asked before each micro-batch.
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
        outputs: Outputs | None = None,
    ) -> None:
        self._micro = plan.batch.micro
        self._summed = plan.batch.accumulation > 1
        self._residence = residence
        self._away = outputs
        self._layers = layers = residence.layers
        self._templates = templates
        self._last = len(layers) - 1
        self._clips = any(instruction.kind == "norm" for instruction in program.instructions)
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
        self._first_micro = tuple(
            i for i in program.instructions if i.micro == 0 and i.kind in _PASSES
        )
        self._scale = torch.tensor(1 / plan.batch.accumulation, device=device)
        self._draws = any(template.draws for template in templates)
        self._active = torch.ones((), dtype=torch.int64, device=device)
        self._layer_keys = [layer_key(layer.name).to(device) for layer in layers]
        self.begin(1)

    def begin(self, step: int) -> None:
        """Forgets the step before and begins `step`, counted from 1."""
        self._step = step
        self._residence.begin(step)
        if self._away is not None:
            self._away.begin()
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self._samples: dict[int, Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._output_gradients: dict[tuple[int, int], Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._norm: float | None = None
        self._squares: list[Tensor] = []
        self._divisor: Tensor | None = None
        for layer in self._layers:
            for weight in layer.owned:
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
            "load": self._load,
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "norm": self._global_norm,
            "update": self._update,
            "sync": self._sync,
            **self._residence.handlers(),
            **({} if self._away is None else self._moves(self._away)),
        }

    def _moves(self, away: Outputs) -> Mapping[Kind, Handler]:
        """The handlers of outputs that wait elsewhere."""

        def keep(layer: int, micro: int) -> None:
            away.keep(layer, micro, self._outputs.pop((layer, micro)))

        def restore(layer: int, micro: int) -> None:
            self._outputs[layer, micro] = away.restore(layer, micro)

        return {"keep": keep, "restore": restore}

    @property
    def loss(self) -> float:
        """Mean loss of the step's micro-batches, in nats a token."""
        return math.fsum(float(loss) for loss in self._losses.values()) / len(self._losses)

    @property
    def gradient_norm(self) -> float:
        """2-norm over all gradients of the step, before clipping."""
        if self._norm is not None:
            return self._norm
        return math.sqrt(math.fsum(float(square) for square in self._squares))

    def _load(self, _: int, micro: int) -> None:
        if self._stop():
            raise StopWished
        first = micro * self._micro
        inputs, targets = self._batches.at(self._step, first, self._micro)
        self._tokens[micro] = (self._to_device(inputs), self._to_device(targets))
        if self._draws:
            keys = sample_keys(self._seed, self._step, first, self._micro)
            self._samples[micro] = keys.to(self._device, non_blocking=True)

    def _to_device(self, tokens: object) -> Tensor:
        tensor = torch.as_tensor(tokens)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _forward(self, layer: int, micro: int) -> None:
        if layer in self.bare:
            with torch.no_grad():
                self._outputs[layer, micro] = self._call(layer, micro, self._input(layer, micro))
            return
        output = self._keep(layer, micro)
        if layer in self.again:
            del self._kept[layer, micro]
        if layer == self._last:
            self._losses[micro] = output.detach()
        else:
            self._outputs[layer, micro] = output.detach()

    def _recompute(self, layer: int, micro: int) -> None:
        self._keep(layer, micro)

    def _backward(self, layer: int, micro: int) -> None:
        x, output = self._kept.pop((layer, micro))
        used = self._layers[layer].used
        wanted = [weight.working for weight in used]
        if layer == self._last:
            gradient = self._scale
        else:
            gradient = self._output_gradients.pop((layer, micro))
        if layer == 0:
            del self._tokens[micro]
        else:
            wanted.append(x)
            del self._outputs[layer - 1, micro]
        found = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        # Nothing of the forward pass may outlive its backward: this is the fullest moment.
        del x, output, gradient, wanted
        if layer > 0:
            passed = found.pop()
            if passed is not None:
                self._output_gradients[layer - 1, micro] = passed
        for weight in reversed(used):
            part = found.pop()
            if part is not None:
                weight.add(part, summed=self._summed)

    def _global_norm(self, _: int, __: int) -> None:
        self._require_finite_losses()
        norms: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            gone = self._residence.norms.get(index)
            norms += self._norms(layer) if gone is None else gone
        # Waits for the device, once a step: weights must not change by a broken gradient.
        self._norm = float(self._optimizer.joined(norms))
        if not math.isfinite(self._norm):
            self._refuse_norm()
        self._divisor = self._optimizer.divisor(self._norm)
        self._residence.ends_backward(self._divisor)

    def _norms(self, layer: LayerParameters) -> list[Tensor]:
        for weight in layer.owned:
            weight.complete()
        return self._optimizer.norms(layer.owned)

    def _update(self, layer: int, _: int) -> None:
        if not self._clips:
            if not self._squares:
                self._require_finite_losses()
            norms = self._norms(self._layers[layer])
            self._squares.append(self._optimizer.joined(norms).square())
        self._residence.update(layer, self._step, self._divisor)

    def _sync(self, _: int, __: int) -> None:
        """One device agrees with itself; the clock waits for it."""

    def _input(self, layer: int, micro: int) -> Tensor:
        if layer == 0:
            return self._tokens[micro][0]
        if self._away is not None:
            self._away.need(layer - 1, micro)
        return self._outputs[layer - 1, micro]

    def _keep(self, layer: int, micro: int) -> Tensor:
        """The output of a forward pass that keeps what its backward needs."""
        x = self._input(layer, micro)
        if layer > 0:
            x = x.detach().requires_grad_()
        output = self._call(layer, micro, x)
        self._kept[layer, micro] = (x, output)
        return output

    def _call(self, layer: int, micro: int, x: Tensor) -> Tensor:
        self._residence.need(layer)
        tensors, template = self._layers[layer], self._templates[layer]
        targets = self._tokens[micro][1] if layer == self._last else None
        keys = None
        if template.draws:
            keys = Keys(
                samples=self._samples[micro], layer=self._layer_keys[layer], active=self._active
            )
        seed = draw_seed(self._seed, self._step, layer, micro * self._micro)
        return template(tensors.weights, tensors.buffers, keys, x, targets, seed=seed)

    def _require_finite_losses(self) -> None:
        for micro, loss in self._losses.items():
            if not math.isfinite(float(loss)):
                first = micro * self._micro
                samples = range(first, first + self._micro)
                raise RunBroken(
                    f"the loss is {float(loss)} at step {self._step}, micro-batch {micro}, over "
                    f"samples {first} to {first + self._micro - 1} from "
                    f"{self._documents(samples)}"
                )

    def _refuse_norm(self) -> None:
        names = [
            weight.name
            for layer in self._layers
            for weight in layer.owned
            if not math.isfinite(float(self._optimizer.norm([weight])))
        ]
        samples = range(self._micro * len(self._losses))
        raise RunBroken(
            f"the gradient of `{names[0]}` and {len(names) - 1} others is not finite at step "
            f"{self._step}, though its losses are, over samples from {self._documents(samples)}"
            if names
            else f"the gradient norm overflows float32 at step {self._step}"
        )

    def _documents(self, samples: Iterable[int]) -> str:
        """Names of the documents that samples of this step draw on."""
        names = list(
            dict.fromkeys(n for at in samples for n in self._batches.documents(self._step, at))
        )
        shown = ", ".join(f"`{name}`" for name in names[:_NAMED_DOCUMENTS])
        more = len(names) - _NAMED_DOCUMENTS
        return f"{shown} and {more} more" if more > 0 else shown
