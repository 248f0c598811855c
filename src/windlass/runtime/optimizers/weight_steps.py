"""Steps of optimizers whose updates read sums over whole weights, pass by pass.

    m, v   as Adam's
    u      = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay w
    w      <- w - rate |w| / |u| u

Source: You et al. 2020, arXiv:1904.00962, algorithm 2, with the norm itself as its function of the
weight. Weights that never decay, norms and biases, are not scaled, as in the authors' code. The
norms are of whole weights, so an update takes two passes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.runtime.optimizers.adafactor import AdafactorStep
from windlass.runtime.optimizers.updates import Chunk, Hyperparameters, Scratch
from windlass.schema import OptimizerLaw

_ROW = 4096
"""Elements whose squares are summed sequentially; sums of rows do not depend on how a weight is
divided into chunks, each of which begins at a row."""


class LambStep:
    """One step of one weight.

    Args:
        scales: whether its update is scaled by the norm of the weight.
    """

    reads_gradient: ClassVar[tuple[bool, ...]] = (True, False)
    """Whether each pass reads gradients."""

    def __init__(self, hyper: Hyperparameters, scratch: Scratch, *, scales: bool) -> None:
        self._hyper, self._scratch, self._scales = hyper, scratch, scales
        self._squares: list[Tensor] = []
        self._ratio: Tensor | None = None

    def visit(self, index: int, chunk: Chunk, gradient: Tensor) -> None:
        """Sees a chunk in one of the two passes; the last one updates it.

        Args:
            gradient: its gradient in the master's precision, which may be overwritten.
        """
        if index == 0:
            self._squares.append(_observe(chunk, gradient, self._hyper, self._scratch))
            return
        update = _direction(chunk, self._hyper, self._scratch)
        if self._ratio is not None:
            update.mul_(self._ratio)
        chunk.master.add_(update, alpha=-self._hyper.host_rate)
        chunk.updates.add_(1)

    def own_sums(self) -> Tensor:
        """`Float[2]`: sums of squares over the chunks that were seen, handed over."""
        squares, self._squares = self._squares, []
        return torch.cat(squares, dim=1).sum(dim=1)

    def take(self, index: int, sums: Tensor) -> None:
        """Goes on with sums over the whole weight."""
        del index
        self._ratio = trust_ratio(sums) if self._scales else None


def _observe(chunk: Chunk, gradient: Tensor, step: Hyperparameters, scratch: Scratch) -> Tensor:
    """Updates the moments of a chunk, and returns sums of squares.

    Returns:
        `Float[2 rows]`: sums over each row of the chunk, of the weight and of its update.
    """
    beta1, beta2 = step.settings.betas
    if step.clip_divisor is not None:
        gradient.div_(step.clip_divisor)
    mean, square = (moment.values for moment in chunk.moments)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return torch.stack((_row_squares(chunk.master), _row_squares(_direction(chunk, step, scratch))))


def trust_ratio(squares: Tensor) -> Tensor:
    """`Float[]`: norm of a whole weight over that of its update; 1 where one of them is 0.

    Args:
        squares: sums of squares of the weight and of its update, `Float[2]`.
    """
    weight, update = squares.sqrt().unbind()
    return torch.where((weight > 0) & (update > 0), weight / update, 1.0)


def _direction(chunk: Chunk, step: Hyperparameters, scratch: Scratch) -> Tensor:
    """The update of a chunk before it is scaled, in its shape; it holds until the next one."""
    settings = step.settings
    mean, square = (moment.values for moment in chunk.moments)
    updates = (chunk.updates + 1).to(mean.dtype)
    # As exp(t log beta) - 1: the difference of 1 and a power close to it would lose digits.
    unbiased1, unbiased2 = (-torch.expm1(updates * math.log(beta)) for beta in settings.betas)
    root = torch.div(square, unbiased2, out=scratch.like(square, 0))
    root.sqrt_().add_(settings.epsilon)
    update = torch.div(mean, unbiased1, out=scratch.like(mean, 1)).div_(root)
    return update.add_(chunk.master, alpha=step.decay) if step.decay else update


def _row_squares(values: Tensor) -> Tensor:
    """`Float[rows]`: sum of squares of each row of 4096 elements, the last of which is shorter."""
    flat = values.reshape(-1)
    even = len(flat) // _ROW * _ROW
    sums = torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1)
    if even < len(flat):
        sums = torch.cat((sums, torch.linalg.vector_norm(flat[even:]).view(1)))
    return sums.square_()


class WeightStep(Protocol):
    """One step of one weight, which sees all of it in each of several passes."""

    reads_gradient: ClassVar[tuple[bool, ...]]
    """Whether each pass reads gradients."""

    def visit(self, index: int, chunk: Chunk, gradient: Tensor) -> None:
        """Sees a chunk in a pass, counted from 0; the last pass updates it.

        The gradient is in the master's precision and may be overwritten if no later pass reads it.
        """

    def own_sums(self) -> Tensor:
        """`Float[n]`: what the chunks of a pass add up to, handed over."""

    def take(self, index: int, sums: Tensor) -> None:
        """Goes on with what a pass summed over the whole weight."""


def step_type(law: OptimizerLaw) -> type[AdafactorStep] | type[LambStep]:
    """The steps of an optimizer that reads sums over whole weights."""
    return AdafactorStep if law.factored else LambStep


def weight_step(
    law: OptimizerLaw,
    hyper: Hyperparameters,
    factors: FactoredMoment | None,
    scratch: Scratch,
    *,
    decays: bool,
) -> WeightStep:
    """A step of one weight.

    Args:
        factors: second moment by rows and columns; None if the weight has none.
    """
    if law.factored:
        return AdafactorStep(hyper, factors, scratch)
    return LambStep(hyper, scratch, scales=decays)


def whole_weight_passes(
    law: OptimizerLaw, new_step: Callable[[str], WeightStep]
) -> Iterator[Callable[[Chunk], None]]:
    """The passes of a step where one rank has whole weights, each called with every chunk."""
    steps: dict[str, tuple[int, WeightStep]] = {}

    def visit(index: int, chunk: Chunk) -> None:
        before, step = steps.get(chunk.name) or (0, new_step(chunk.name))
        if before < index:
            step.take(before, step.own_sums())
        steps[chunk.name] = index, step
        step.visit(index, chunk, chunk.gradient)

    return (partial(visit, index) for index in range(len(step_type(law).reads_gradient)))
