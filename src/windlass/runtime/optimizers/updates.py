"""The update of each optimizer: one function, which changes pieces of weights in place.

What an optimizer keeps, reads and costs is in its law, `windlass.schema.OptimizerLaw`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.schema import OptimizerName, TrainSettings
from windlass.torch_ext import StoredMoment


class Chunk(NamedTuple):
    """A contiguous piece of one parameter with its optimizer state."""

    name: str
    """Full name of the parameter."""
    offset: int
    """First element of the chunk in the parameter."""
    master: Tensor
    moments: tuple[StoredMoment, ...]
    gradient: Tensor
    working: Tensor | None
    """Working copy to refresh from the master; None where layers compute with the master itself."""
    updates: Tensor
    """`Float[]`: updates so far; the update increments it."""
    decays: bool = True
    """Whether weight decay applies, where a step is asked for it chunk by chunk."""
    average: Tensor | None = None
    """Average of the weights, there updated in place; None if none is kept."""
    factors: FactoredMoment | None = None
    """Second moment by rows and columns of the whole weight; None if none is kept."""


class Hyperparameters(NamedTuple):
    """The hyperparameters of one step for weights of one group."""

    settings: TrainSettings
    rate: float | Tensor
    """Learning rate of the step; `Float[]` on the device where the update is recorded."""
    decay: float
    """Weight decay."""
    clip_divisor: Tensor | None
    """Divisor of all gradients; None for 1."""
    step: int = 1
    """Step number, counted from 1."""
    newest_share: float = 1.0
    """Share of the newest weights in the average of a schedule-free optimizer."""

    @property
    def host_rate(self) -> float:
        """The learning rate, for an update that takes it from the host and is never recorded.

        Raises:
            TypeError: the device has it.
        """
        if isinstance(self.rate, Tensor):
            raise TypeError("this update cannot be recorded: it takes its rate from the host")
        return self.rate


Update = Callable[[Sequence[Chunk], list[Tensor], Hyperparameters], None]
"""Takes one step for some chunks, given their gradients in the masters' precision, which it may
overwrite; it changes masters and moments in place and increments the counts of updates."""


def adamw(chunks: Sequence[Chunk], gradients: list[Tensor], step: Hyperparameters) -> None:
    """AdamW by torch's fused kernel.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """
    beta1, beta2 = step.settings.betas
    torch_adamw(
        [chunk.master for chunk in chunks],
        gradients,
        _moments(chunks, 0),
        _moments(chunks, 1),
        [],
        [chunk.updates for chunk in chunks],
        fused=True,
        grad_scale=step.clip_divisor,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=step.rate,
        weight_decay=step.decay,
        eps=step.settings.epsilon,
        maximize=False,
    )


def sgd(chunks: Sequence[Chunk], gradients: list[Tensor], step: Hyperparameters) -> None:
    """SGD with momentum by torch's fused kernel; weight decay adds to the gradient.

    `m <- momentum m + g + decay w`, then `w <- w - rate m`; with `nesterov` the gradient is added
    once more. Source: Sutskever et al. 2013.
    """
    momentum: list[Tensor | None] = [*_moments(chunks, 0)]
    torch_sgd(
        [chunk.master for chunk in chunks],
        gradients,
        momentum,
        fused=True,
        grad_scale=step.clip_divisor,
        weight_decay=step.decay,
        momentum=step.settings.momentum,
        lr=cast("float", step.rate),  # its kernel reads it from the device too
        dampening=0.0,
        nesterov=step.settings.nesterov,
        maximize=False,
    )
    _count(chunks)


def lion(chunks: Sequence[Chunk], gradients: list[Tensor], step: Hyperparameters) -> None:
    """Lion: `w <- (1 - rate decay) w - rate sign(beta1 m + (1 - beta1) g)`, then `m` with beta2.

    The sign rises from -1 to 1 between -epsilon and epsilon, by default so narrowly that it is a
    step. Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """
    beta1, beta2 = step.settings.betas
    masters, means = [chunk.master for chunk in chunks], _moments(chunks, 0)
    if step.clip_divisor is not None:
        torch._foreach_div_(gradients, step.clip_divisor)
    signs = torch._foreach_lerp(means, gradients, 1 - beta1)  # noqa: SLF001  no public name
    torch._foreach_mul_(signs, 1 / step.settings.epsilon)
    torch._foreach_clamp_min_(signs, -1.0)
    torch._foreach_clamp_max_(signs, 1.0)
    torch._foreach_mul_(masters, 1 - step.host_rate * step.decay)
    torch._foreach_add_(masters, signs, alpha=-step.host_rate)
    torch._foreach_lerp_(means, gradients, 1 - beta2)
    _count(chunks)


def schedule_free(chunks: Sequence[Chunk], gradients: list[Tensor], step: Hyperparameters) -> None:
    """Schedule-free AdamW, without its averaged weights `x`.

    Gradients are taken at the trained weights `y = beta1 x + (1 - beta1) z`:

        v   as AdamW's
        u = g / (sqrt(v / (1 - beta2^t)) + epsilon) + decay y
        y <- (1 - c) y + c z - rate (1 - beta1 (1 - c)) u
        z <- z - rate u

    where c is the share of z in its average x. Source: Defazio et al. 2024, arXiv:2405.15682,
    algorithm 1, with the order of operations of the authors' `AdamWScheduleFree`.
    """
    beta1, beta2 = step.settings.betas
    masters, share = [chunk.master for chunk in chunks], step.newest_share
    leading, squares = _moments(chunks, 0), _moments(chunks, 1)
    if step.clip_divisor is not None:
        torch._foreach_div_(gradients, step.clip_divisor)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    _count(chunks)
    unbiased = [_unbiased(chunk.updates, beta2, chunk.master.dtype) for chunk in chunks]
    roots = [square / each for square, each in zip(squares, unbiased, strict=True)]
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, step.settings.epsilon)
    torch._foreach_div_(gradients, roots)
    if step.decay:
        torch._foreach_add_(gradients, masters, alpha=step.decay)
    torch._foreach_lerp_(masters, leading, share)
    torch._foreach_add_(masters, gradients, alpha=step.host_rate * (beta1 * (1 - share) - 1))
    torch._foreach_sub_(leading, gradients, alpha=step.host_rate)


def _unbiased(updates: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
    """`Float[]`: `1 - beta^updates`."""
    # As exp(t log beta) - 1: the difference of 1 and a power close to it would lose digits.
    return -torch.expm1(updates.to(dtype) * math.log(beta))


UPDATES: Mapping[OptimizerName, Update] = {
    "adamw": adamw, "lion": lion, "sgd": sgd, "schedule-free": schedule_free,
}  # fmt: skip
"""The update of each optimizer whose elements do not read each other, by its name."""


def _moments(chunks: Sequence[Chunk], which: int) -> list[Tensor]:
    return [chunk.moments[which].values for chunk in chunks]


def _count(chunks: Sequence[Chunk]) -> None:
    torch._foreach_add_([chunk.updates for chunk in chunks], 1)


class Scratch:
    """Flat tensors for intermediate results, which stay in the cache from one piece to the next.

    Results of their own would be new memory each: products of 2 M gradients take a CPU 0.8 ms
    there and 0.6 ms here (one thread of an AMD EPYC, torch 2.13, 2026-11-24).
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def like(self, values: Tensor, index: int = 0) -> Tensor:
        """Memory in the shape and type of `values`; it holds until the index is asked for again."""
        count = values.numel()
        while len(self._tensors) <= index:
            self._tensors.append(values.new_empty(0))
        if len(self._tensors[index]) < count or self._tensors[index].dtype != values.dtype:
            self._tensors[index] = torch.empty_like(values).view(-1)
        return self._tensors[index][:count].view(values.shape)
