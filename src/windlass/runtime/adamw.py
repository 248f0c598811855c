"""AdamW for one layer at a time, the learning rate schedule and the global gradient norm."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from windlass.runtime.parameters import MasterParameter, ModelParameter
from windlass.schema import MomentFormat, TrainSettings
from windlass.torch_ext import PART_ELEMENTS, Device, MomentCodec, StoredMoment, dither_key

_HALF_BYTES = 2
"""Of an element in bfloat16 or float16; such gradients are converted to float32 first."""

_ROW = 4096
"""Elements whose squares are summed sequentially."""

_Item = TypeVar("_Item")


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Learning rate of a step: linear warm-up, then what the schedule says.

    Sources: `cosine` Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5, without
    restarts; `wsd` Hu et al. 2024, arXiv:2404.06395, with the linear decay of Hägele et al. 2024,
    arXiv:2405.18392; `inverse_sqrt` Vaswani et al. 2017, arXiv:1706.03762, equation 3.

    Args:
        settings: peak rate, schedule, shares of warm-up and decay, final share, number of steps.
        step: step number, counted from 1.
    """
    steps, schedule = settings.steps, settings.schedule
    warmup_steps = round(settings.warmup * steps)
    if step <= warmup_steps:
        return settings.learning_rate * step / warmup_steps
    if schedule == "inverse_sqrt":
        return settings.learning_rate * math.sqrt(max(1, warmup_steps) / step)
    falling = round(settings.decay * steps) if schedule == "wsd" else steps - warmup_steps
    falling = max(1, falling)
    progress = min(1.0, max(0, step - (steps - falling)) / falling)
    height = 1 - progress
    if schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule == "constant":
        height = 1.0
    share = settings.final_rate + (1 - settings.final_rate) * height
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
        self, settings: TrainSettings, device: Device, moments: MomentFormat = "float32"
    ) -> None:
        self._settings, self._device = settings, device
        self.codec = None if moments == "float32" else MomentCodec(device.torch_device)
        """Encodes and decodes moments; None where they are stored in float32."""
        self._buffer: Tensor | None = None
        """`Float32[piece_elements]`: gradients in float32, valid until the next conversion."""

    def gradient_norm(self, weights: Iterable[ModelParameter]) -> Tensor:
        """`Float[]`: 2-norm over all gradients together, summed in float32."""
        return self.combine_norms(self.gradient_norms(weights))

    def gradient_norms(self, weights: Iterable[ModelParameter]) -> list[Tensor]:
        """`Float[]` each: 2-norms of parts of a layer's gradients, for `combine_norms`."""
        return self.gradient_norms_by_layer([weights])[0]

    def gradient_norms_by_layer(
        self, layers: Sequence[Iterable[ModelParameter]]
    ) -> list[list[Tensor]]:
        """`Float[]` each: for each layer the 2-norms of parts of its gradients.

        An accelerator norms all layers in one call, with the same bits as layer by layer.
        """
        by_layer = [[w.gradient for w in layer if w.gradient is not None] for layer in layers]
        if not self._device.is_asynchronous:
            return [self._norms_on_cpu(gradients) for gradients in by_layer]
        gradients = [gradient for layer in by_layer for gradient in layer]
        if not gradients:
            return [[] for _ in layers]
        wide = None if gradients[0].dtype == torch.float64 else torch.float32
        norms = iter(torch._foreach_norm(gradients, 2, dtype=wide))  # noqa: SLF001  no public name
        return [list(islice(norms, len(layer))) for layer in by_layer]

    def combine_norms(self, norms: list[Tensor]) -> Tensor:
        """`Float[]`: 2-norm over all parts together."""
        if not norms:
            return torch.zeros((), device=self._device.torch_device)
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip_divisor(self, norm: float, *, scale: float = 1.0) -> Tensor | None:
        """`Float[]`: divisor that undoes the loss scale and limits the gradient norm to the clip.

        Without a scale it is the reciprocal of the coefficient of `torch.nn.utils.clip_grad_norm_`;
        None for 1.

        Args:
            norm: gradient norm, without the scale.
            scale: what the loss was multiplied by.
        """
        clip, divisor = self._settings.clip, scale
        if clip is not None and norm + 1e-6 > clip:
            divisor *= (norm + 1e-6) / clip
        if divisor == 1:
            return None
        # Filled on the device: copying a number to it would make the host wait.
        return torch.full((), divisor, device=self._device.torch_device)

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
        present = [weight for weight in weights if weight.gradient is not None]
        for decays in (True, False):
            decay = self._decay(decays)
            chunks = (
                c for weight in present if weight.decays is decays for c in self._chunks(weight)
            )
            if self.codec is not None:
                for chunk in chunks:
                    self._step_encoded(self.codec, chunk, step, rate, decay, clip_divisor)
                continue
            for group in _groups(chunks, _converted_elements, self._device.piece_elements):
                self._step(group, rate, decay, clip_divisor)

    def update_part(self, part: "ParameterPart", *, step: int, clip_divisor: Tensor | None) -> None:
        """Takes one step of AdamW for a part of one parameter, in place.

        Args:
            part: master weights, moments and gradient of the part.
            step: step number, counted from 1; determines the learning rate.
            clip_divisor: divisor of all gradients; None for 1.
        """
        decay, rate = self._decay(part.decays), learning_rate(self._settings, step)
        # Filled on the device: copying a number to it would make the host wait.
        updates = torch.full((), float(part.updates), device=part.master.device)
        chunk = _Chunk(
            part.name, part.offset, part.master, part.moments, part.gradient, None, updates
        )
        if self.codec is not None:
            self._step_encoded(self.codec, chunk, step, rate, decay, clip_divisor)
        else:
            self._step([chunk], rate, decay, clip_divisor)

    def _decay(self, decays: bool) -> float:
        return self._settings.weight_decay if decays else 0.0

    def _step(
        self, chunks: Sequence["_Chunk"], rate: float, decay: float, clip_divisor: Tensor | None
    ) -> None:
        """Updates chunks with float32 moments in one call, and increments their updates."""
        beta1, beta2 = self._settings.betas
        adamw(
            [chunk.master for chunk in chunks],
            self._float([chunk.gradient for chunk in chunks]),
            [chunk.moments[0].values for chunk in chunks],
            [chunk.moments[1].values for chunk in chunks],
            [],
            [chunk.updates for chunk in chunks],
            fused=True,
            grad_scale=clip_divisor,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._settings.epsilon,
            maximize=False,
        )
        refreshed = [chunk for chunk in chunks if chunk.working is not None]
        if refreshed:
            working = [chunk.working for chunk in refreshed if chunk.working is not None]
            torch._foreach_copy_(working, [chunk.master for chunk in refreshed])

    def _step_encoded(
        self,
        codec: MomentCodec,
        chunk: "_Chunk",
        step: int,
        rate: float,
        decay: float,
        clip_divisor: Tensor | None,
    ) -> None:
        """Updates a chunk, and decodes and encodes its moments part by part."""
        master, (gradient,) = _flat(chunk.master), self._float([_flat(chunk.gradient)])
        for start in range(0, master.numel(), PART_ELEMENTS):
            n = min(PART_ELEMENTS, master.numel() - start)
            stored = (chunk.moments[0].narrow(start, n), chunk.moments[1].narrow(start, n))
            values = codec.decode(stored)
            decoded = chunk._replace(
                master=master[start : start + n],
                gradient=gradient[start : start + n],
                moments=(StoredMoment(values[0]), StoredMoment(values[1])),
                working=None,
                updates=chunk.updates.clone(),
            )
            self._step([decoded], rate, decay, clip_divisor)
            part_index = (chunk.offset + start) // PART_ELEMENTS
            key = dither_key(self._settings.seed, step, chunk.name, part_index)
            codec.encode(values, stored, key)
        if chunk.working is not None:
            chunk.working.copy_(chunk.master)
        chunk.updates.add_(1)

    def _norms_on_cpu(self, gradients: list[Tensor]) -> list[Tensor]:
        """2-norms of a layer's gradients, piece by piece, so that conversions stay in the cache."""
        pieces = (piece for gradient in gradients for piece in self._pieces(_flat(gradient)))
        groups = _groups(pieces, torch.numel, self._device.piece_elements)
        return [norm for group in groups for norm in self._piece_norms(group)]

    def _piece_norms(self, gradients: list[Tensor]) -> Iterator[Tensor]:
        """2-norms of flat gradients, of all together where they are converted."""
        if gradients[0].dtype.itemsize == _HALF_BYTES:
            wide = self._float(gradients)
            gradients = [self._float_buffer()[: sum(map(len, wide))]]
        short = [gradient for gradient in gradients if len(gradient) < _ROW]
        for gradient in gradients:
            # By short rows, because torch sums squares sequentially in float32: over 2 M of them
            # the error is 3e-5, and over 38.6 M 0.2 %; by rows it is 4e-8, in the same time.
            even = len(gradient) // _ROW * _ROW
            if even:
                rows = torch.linalg.vector_norm(gradient[:even].view(-1, _ROW), dim=1)
                yield torch.linalg.vector_norm(rows)
                short += [gradient[even:]] if even < len(gradient) else []
        if short:
            yield from torch._foreach_norm(short)  # noqa: SLF001  it has no public name

    def _chunks(self, weight: MasterParameter) -> Iterator["_Chunk"]:
        """A parameter in pieces of the device, or in one where nothing is converted.

        It gives up its gradient.
        """
        gradient, weight.gradient = weight.gradient, None
        if gradient is None:
            return
        if weight.working is weight.master:
            yield _Chunk(
                weight.name, weight.offset, weight.master.detach(), weight.moments, gradient, None,
                weight.steps,
            )  # fmt: skip
            return
        moment1, moment2 = weight.moments
        flat = [self._pieces(_flat(tensor)) for tensor in (weight.master, gradient, weight.working)]
        del gradient
        last, start = len(flat[0]) - 1, 0
        for index, (master, grad, working) in enumerate(zip(*flat, strict=True)):
            n = len(master)
            moments = (moment1.narrow(start, n), moment2.narrow(start, n))
            # The update of a chunk increments its count: that of the last is the weight's own.
            updates = weight.steps if index == last else weight.steps.clone()
            yield _Chunk(
                weight.name, weight.offset + start, master, moments, grad, working, updates
            )
            start += n

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(self._device.piece_elements)

    def _float(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients in float32: themselves, or flat and one after the other in the buffer.

        What is in the buffer is valid until the next call.
        """
        if gradients[0].dtype.itemsize != _HALF_BYTES:
            return gradients
        counts = [gradient.numel() for gradient in gradients]
        wide = list(self._float_buffer()[: sum(counts)].split(counts))
        torch._foreach_copy_(wide, gradients)
        return wide

    def _float_buffer(self) -> Tensor:
        if self._buffer is None:
            device = self._device.torch_device
            self._buffer = torch.empty(self._device.piece_elements, device=device)
        return self._buffer


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
    updates: Tensor
    """`Float[]`: updates so far; the update increments it."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _converted_elements(chunk: _Chunk) -> int:
    """Elements of a chunk that pass through the cache; none if nothing is converted."""
    return 0 if chunk.working is None else chunk.master.numel()


def _groups(
    items: Iterable[_Item], size: Callable[[_Item], int], limit: int
) -> Iterator[list[_Item]]:
    """Items in groups whose sizes add up to `limit` at most; an item is no larger than that."""
    group: list[_Item] = []
    total = 0
    for item in items:
        total += size(item)
        if total > limit:
            yield group
            group, total = [], size(item)
        group.append(item)
    if group:
        yield group
