"""AdamW for one layer at a time, the learning rate as a function of the step, the global norm."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from windlass.runtime.parameters import CHUNK, Parameter, Weight
from windlass.schema.plan import Moments
from windlass.schema.request import TrainRequest
from windlass.torch_ext.quantized_moments import PART, Codec, Kept, dither_key

_ROW = 4096
"""Elements whose squares are added one after the other."""


def learning_rate(settings: TrainRequest, step: int) -> float:
    """The rate of a step: a straight rise over the warm-up, then half a cosine to the final rate.

    Source: Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5, without restarts.

    Args:
        settings: peak, warm-up, final share and the number of steps.
        step: counted from 1.
    """
    rising = round(settings.warmup * settings.steps)
    if step <= rising:
        return settings.learning_rate * step / rising
    done = min(1.0, (step - rising) / max(1, settings.steps - rising))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    share = settings.final_rate + (1 - settings.final_rate) * cosine
    return settings.learning_rate * share


class Optimizer:
    """AdamW as `settings` ask for; it holds no state but small buffers.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101; weights of one dimension never decay.

    Args:
        settings: betas, epsilon, decay, rate and clip.
        device: where the weights are.
        moments: how they are kept; but for float32 they are decoded part by part.
    """

    def __init__(
        self, settings: TrainRequest, device: torch.device, moments: Moments = "float32"
    ) -> None:
        self._settings = settings
        self.codec = None if moments == "float32" else Codec(device)
        """None where moments are kept as the update takes them."""
        self._buffer = torch.empty(CHUNK, device=device)
        self._found = torch.zeros((), device=device)

    def norm(self, weights: Iterable[Parameter]) -> Tensor:
        """`Float[]`: the 2-norm over all gradients together, summed in float32."""
        return self.joined(self.norms(weights))

    def norms(self, weights: Iterable[Parameter]) -> list[Tensor]:
        """`Float[]` each: the 2-norms of parts of the gradients, to be joined with others."""
        return [norm for weight in weights for norm in self._norms(weight)]

    def joined(self, norms: list[Tensor]) -> Tensor:
        """`Float[]`: the 2-norm over all parts together."""
        if not norms:
            return torch.zeros((), device=self._buffer.device)
        return torch.linalg.vector_norm(torch.stack(norms))

    def divisor(self, norm: float) -> Tensor | None:
        """`Float[]`: what gradients are divided by so that their norm is at most the clip.

        The reciprocal of `torch.nn.utils.clip_grad_norm_`'s coefficient; None for 1.
        """
        if self._settings.clip is None or norm + 1e-6 <= self._settings.clip:
            return None
        return torch.tensor((norm + 1e-6) / self._settings.clip, device=self._buffer.device)

    def update(self, weights: Iterable[Weight], step: int, divisor: Tensor | None) -> None:
        """One step of AdamW for weights that have a gradient; gradients are gone afterwards.

        Args:
            weights: of one layer.
            step: counted from 1.
            divisor: of all gradients; None for 1.
        """
        rate = learning_rate(self._settings, step)
        at_once: dict[float, list[tuple[Weight, _Part]]] = {}
        for weight in weights:
            if weight.gradient is None:
                continue
            decay = self._settings.weight_decay if weight.decays else 0.0
            parts = self._parts(weight, weight.gradient)
            if self.codec is None and weight.working is weight.master:
                at_once.setdefault(decay, []).extend((weight, whole) for whole in parts)
                continue
            for part in parts:
                self._step(part, weight.steps, step, rate, decay, divisor)
                if part.working is not None:
                    part.working.copy_(part.master)
            weight.steps += 1
            weight.gradient = None
        for decay, wholes in at_once.items():
            steps = [weight.steps for weight, _ in wholes]
            self._adamw([whole for _, whole in wholes], steps, rate, decay, divisor)
            for weight, _ in wholes:
                weight.gradient = None

    def apply(
        self,
        master: Tensor,
        moments: tuple[Kept, Kept],
        gradient: Tensor,
        *,
        name: str,
        first: int,
        step: int,
        updates: int,
        decays: bool,
        divisor: Tensor | None,
    ) -> None:
        """One step of AdamW for a piece of one weight.

        Args:
            master: changed in place, as the moments are.
            moments: the first and the second.
            gradient: float32.
            name: of the weight.
            first: element of the piece in it, a multiple of `PART`.
            step: counted from 1; gives the rate.
            updates: that the weight has had before.
            decays: whether it is pulled towards zero.
            divisor: of all gradients; None for 1.
        """
        part = _Part(name, first, master, moments, gradient, None)
        decay = self._settings.weight_decay if decays else 0.0
        rate = learning_rate(self._settings, step)
        # Filled where it lies: a number that is copied to a device makes the host wait.
        done = torch.full((), float(updates), device=master.device)
        self._step(part, done, step, rate, decay, divisor)

    def _step(
        self,
        part: "_Part",
        updates: Tensor,
        step: int,
        rate: float,
        decay: float,
        divisor: Tensor | None,
    ) -> None:
        """Updates a part; decodes and encodes its moments by smaller ones, where need be."""
        # Copies, because torch counts up what it is given, and a weight comes in parts.
        if self.codec is None:
            self._adamw([part], [updates.clone()], rate, decay, divisor)
            return
        master, gradient = _flat(part.master), _flat(part.gradient)
        for at in range(0, master.numel(), PART):
            n = min(PART, master.numel() - at)
            kept = (part.moments[0].part(at, n), part.moments[1].part(at, n))
            values = self.codec.decode(kept)
            decoded = part._replace(
                master=master[at : at + n],
                gradient=gradient[at : at + n],
                moments=(Kept(values[0]), Kept(values[1])),
            )
            self._adamw([decoded], [updates.clone()], rate, decay, divisor)
            key = dither_key(self._settings.seed, step, part.name, (part.first + at) // PART)
            self.codec.encode(values, kept, key)

    def _adamw(
        self,
        parts: Sequence["_Part"],
        updates: list[Tensor],
        rate: float,
        decay: float,
        divisor: Tensor | None,
    ) -> None:
        """Updates parts whose moments are plain, in one call; counts each one's updates up."""
        beta1, beta2 = self._settings.betas
        adamw(
            [part.master for part in parts],
            [part.gradient for part in parts],
            [part.moments[0].values for part in parts],
            [part.moments[1].values for part in parts],
            [],
            updates,
            fused=True,
            grad_scale=divisor,
            found_inf=None if divisor is None else self._found,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._settings.epsilon,
            maximize=False,
        )

    def _norms(self, weight: Parameter) -> Iterator[Tensor]:
        if weight.gradient is None:
            return
        for part in _flat(weight.gradient).split(CHUNK):
            wide = self._float(part) if part.dtype == torch.bfloat16 else part
            # In short rows, for torch adds squares one after the other in float32: over 2 M of them
            # it is off by 3e-5, and over 38.6 M by 0.2 %; so by 4e-8, in the same time.
            even = len(wide) // _ROW * _ROW
            if even:
                yield torch.linalg.vector_norm(
                    torch.linalg.vector_norm(wide[:even].view(-1, _ROW), dim=1)
                )
            if even < len(wide):
                yield torch.linalg.vector_norm(wide[even:])

    def _parts(self, weight: Weight, gradient: Tensor) -> Iterator["_Part"]:
        """A weight in parts that stay in the cache, or whole where nothing is converted."""
        if weight.working is weight.master:
            master = weight.master.detach()
            yield _Part(weight.name, weight.first, master, weight.moments, gradient, None)
            return
        one, two = weight.moments
        tensors = (weight.master, gradient, weight.working)
        pieces = zip(*(_flat(tensor).split(CHUNK) for tensor in tensors), strict=True)
        for first, (master, part, working) in zip(count(0, CHUNK), pieces, strict=False):
            converted = part if part.dtype == torch.float32 else self._float(part)
            moments = (one.part(first, len(master)), two.part(first, len(master)))
            yield _Part(weight.name, weight.first + first, master, moments, converted, working)

    def _float(self, part: Tensor) -> Tensor:
        """A part of a gradient in float32, valid until the next one is asked for."""
        return self._buffer[: part.numel()].copy_(part)


class _Part(NamedTuple):
    name: str
    """Of the weight."""
    first: int
    """Element of the weight."""
    master: Tensor
    moments: tuple[Kept, Kept]
    gradient: Tensor
    working: Tensor | None
    """To be made from the master; None where layers compute with the master itself."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
