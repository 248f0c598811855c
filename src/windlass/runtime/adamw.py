"""AdamW for one layer at a time, the learning rate schedule and the global gradient norm."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from windlass.runtime.parameters import CHUNK_ELEMENTS, MasterParameter, ModelParameter
from windlass.schema import MomentFormat, TrainSettings
from windlass.torch_ext import PART_ELEMENTS, MomentCodec, StoredMoment, dither_key

_ROW = 4096
"""Elements whose squares are summed sequentially."""


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Learning rate of a step: linear warm-up, then cosine decay to the final rate.

    Source: Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5, without restarts.

    Args:
        settings: peak rate, warm-up share, final share and number of steps.
        step: step number, counted from 1.
    """
    warmup_steps = round(settings.warmup * settings.steps)
    if step <= warmup_steps:
        return settings.learning_rate * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, settings.steps - warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    share = settings.final_rate + (1 - settings.final_rate) * cosine
    return settings.learning_rate * share


class AdamW:
    """AdamW with the hyperparameters of `settings`; it holds no state except small buffers.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101; weights of one dimension never decay.

    Args:
        settings: betas, epsilon, weight decay, learning rate and clip.
        device: device of the weights.
        moments: storage format of the moments; all but float32 are decoded part by part.
    """

    def __init__(
        self, settings: TrainSettings, device: torch.device, moments: MomentFormat = "float32"
    ) -> None:
        self._settings = settings
        self.codec = None if moments == "float32" else MomentCodec(device)
        """Encodes and decodes moments; None where they are stored in float32."""
        self._buffer = torch.empty(CHUNK_ELEMENTS, device=device)
        self._found_inf = torch.zeros((), device=device)

    def gradient_norm(self, weights: Iterable[ModelParameter]) -> Tensor:
        """`Float[]`: 2-norm over all gradients together, summed in float32."""
        return self.combine_norms(self.gradient_norms(weights))

    def gradient_norms(self, weights: Iterable[ModelParameter]) -> list[Tensor]:
        """`Float[]` each: 2-norms of chunks of the gradients, for `combine_norms`."""
        return [norm for weight in weights for norm in self._norms(weight)]

    def combine_norms(self, norms: list[Tensor]) -> Tensor:
        """`Float[]`: 2-norm over all chunks together."""
        if not norms:
            return torch.zeros((), device=self._buffer.device)
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip_divisor(self, norm: float) -> Tensor | None:
        """`Float[]`: divisor that reduces the gradient norm to at most the clip.

        It is the reciprocal of the coefficient of `torch.nn.utils.clip_grad_norm_`; None for 1.
        """
        if self._settings.clip is None or norm + 1e-6 <= self._settings.clip:
            return None
        return torch.tensor((norm + 1e-6) / self._settings.clip, device=self._buffer.device)

    def update(
        self, weights: Iterable[MasterParameter], step: int, clip_divisor: Tensor | None
    ) -> None:
        """Takes one step of AdamW for parameters that have a gradient, and drops the gradients.

        Args:
            weights: parameters of one layer.
            step: step number, counted from 1.
            clip_divisor: divisor of all gradients; None for 1.
        """
        rate = learning_rate(self._settings, step)
        unconverted: dict[float, list[tuple[MasterParameter, _Chunk]]] = {}
        for weight in weights:
            if weight.gradient is None:
                continue
            decay = self._decay(weight.decays)
            chunks = self._chunks(weight, weight.gradient)
            if self.codec is None and weight.working is weight.master:
                unconverted.setdefault(decay, []).extend((weight, chunk) for chunk in chunks)
                continue
            for chunk in chunks:
                self._step(chunk, weight.steps, step, rate, decay, clip_divisor)
                if chunk.working is not None:
                    chunk.working.copy_(chunk.master)
            weight.steps += 1
            weight.gradient = None
        for decay, pairs in unconverted.items():
            steps = [weight.steps for weight, _ in pairs]
            self._adamw([chunk for _, chunk in pairs], steps, rate, decay, clip_divisor)
            for weight, _ in pairs:
                weight.gradient = None

    def update_part(self, part: "ParameterPart", *, step: int, clip_divisor: Tensor | None) -> None:
        """Takes one step of AdamW for a part of one parameter, in place.

        Args:
            part: master weights, moments and gradient of the part.
            step: step number, counted from 1; determines the learning rate.
            clip_divisor: divisor of all gradients; None for 1.
        """
        chunk = _Chunk(part.name, part.offset, part.master, part.moments, part.gradient, None)
        decay, rate = self._decay(part.decays), learning_rate(self._settings, step)
        # Filled on the device: copying a number to it would make the host wait.
        updates = torch.full((), float(part.updates), device=part.master.device)
        self._step(chunk, updates, step, rate, decay, clip_divisor)

    def _decay(self, decays: bool) -> float:
        return self._settings.weight_decay if decays else 0.0

    def _step(
        self,
        chunk: "_Chunk",
        updates: Tensor,
        step: int,
        rate: float,
        decay: float,
        clip_divisor: Tensor | None,
    ) -> None:
        """Updates a chunk; decodes and encodes its moments part by part where they have a codec."""
        # `updates` is cloned because torch increments it, and one parameter has many chunks.
        if self.codec is None:
            self._adamw([chunk], [updates.clone()], rate, decay, clip_divisor)
            return
        master, gradient = _flat(chunk.master), _flat(chunk.gradient)
        for start in range(0, master.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, master.numel() - start)
            stored = (chunk.moments[0].narrow(start, n), chunk.moments[1].narrow(start, n))
            values = self.codec.decode(stored)
            decoded = chunk._replace(
                master=master[start : start + n],
                gradient=gradient[start : start + n],
                moments=(StoredMoment(values[0]), StoredMoment(values[1])),
            )
            self._adamw([decoded], [updates.clone()], rate, decay, clip_divisor)
            part_index = (chunk.offset + start) // PART_ELEMENTS
            key = dither_key(self._settings.seed, step, chunk.name, part_index)
            self.codec.encode(values, stored, key)

    def _adamw(
        self,
        chunks: Sequence["_Chunk"],
        updates: list[Tensor],
        rate: float,
        decay: float,
        clip_divisor: Tensor | None,
    ) -> None:
        """Updates chunks with float32 moments in one call, and increments each of `updates`."""
        beta1, beta2 = self._settings.betas
        adamw(
            [chunk.master for chunk in chunks],
            [chunk.gradient for chunk in chunks],
            [chunk.moments[0].values for chunk in chunks],
            [chunk.moments[1].values for chunk in chunks],
            [],
            updates,
            fused=True,
            grad_scale=clip_divisor,
            found_inf=None if clip_divisor is None else self._found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._settings.epsilon,
            maximize=False,
        )

    def _norms(self, weight: ModelParameter) -> Iterator[Tensor]:
        if weight.gradient is None:
            return
        for chunk in _flat(weight.gradient).split(CHUNK_ELEMENTS):
            wide = self._float(chunk) if chunk.dtype == torch.bfloat16 else chunk
            # By short rows, because torch sums squares sequentially in float32: over 2 M of them
            # the error is 3e-5, and over 38.6 M 0.2 %; by rows it is 4e-8, in the same time.
            even = len(wide) // _ROW * _ROW
            if even:
                yield torch.linalg.vector_norm(
                    torch.linalg.vector_norm(wide[:even].view(-1, _ROW), dim=1)
                )
            if even < len(wide):
                yield torch.linalg.vector_norm(wide[even:])

    def _chunks(self, weight: MasterParameter, gradient: Tensor) -> Iterator["_Chunk"]:
        """A parameter in chunks that stay in the cache, or in one where nothing is converted."""
        if weight.working is weight.master:
            master = weight.master.detach()
            yield _Chunk(weight.name, weight.offset, master, weight.moments, gradient, None)
            return
        moment1, moment2 = weight.moments
        tensors = (weight.master, gradient, weight.working)
        splits = zip(*(_flat(tensor).split(CHUNK_ELEMENTS) for tensor in tensors), strict=True)
        starts = count(0, CHUNK_ELEMENTS)
        for start, (master, grad, working) in zip(starts, splits, strict=False):
            converted = grad if grad.dtype == torch.float32 else self._float(grad)
            n = len(master)
            moments = (moment1.narrow(start, n), moment2.narrow(start, n))
            yield _Chunk(weight.name, weight.offset + start, master, moments, converted, working)

    def _float(self, chunk: Tensor) -> Tensor:
        """A chunk of a gradient in float32, valid until the next call."""
        return self._buffer[: chunk.numel()].copy_(chunk)


class ParameterPart(NamedTuple):
    """A contiguous part of one parameter with its optimizer state, for `AdamW.update_part`."""

    name: str
    """Full name of the parameter."""
    offset: int
    """First element of the part in the parameter; a multiple of `PART_ELEMENTS`."""
    master: Tensor
    """Master weights, updated in place."""
    moments: tuple[StoredMoment, StoredMoment]
    """First and second moment, updated in place."""
    gradient: Tensor
    """Gradient in float32."""
    updates: int
    """Updates that the parameter has had before this one."""
    decays: bool
    """Whether weight decay applies."""


class _Chunk(NamedTuple):
    name: str
    """Full name of the parameter."""
    offset: int
    """First element of the chunk in the parameter."""
    master: Tensor
    moments: tuple[StoredMoment, StoredMoment]
    gradient: Tensor
    working: Tensor | None
    """Working copy to refresh from the master; None where layers compute with the master itself."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
