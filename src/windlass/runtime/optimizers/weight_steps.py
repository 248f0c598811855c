"""Steps of optimizers whose updates read sums over whole weights, pass by pass.

    m, v   as Adam's
    u      = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay w
    w      <- w - rate |w| / |u| u

Source: You et al. 2020, arXiv:1904.00962, algorithm 2, with the norm itself as its function of the
weight. Weights that never decay, norms and biases, are not scaled, as in the authors' code. The
norms are of whole weights, so an update takes two passes.

    m <- momentum m + (1 - momentum) g
    u = (1 - momentum) g + momentum m, or m without `nesterov`
    w <- (1 - rate decay) w - 0.2 sqrt(max(rows, columns)) rate orthogonal(u)

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the factor, with which an
update is as large as AdamW's and takes its learning rate, Liu et al. 2025, arXiv:2502.16982,
equation 4. Matrices between a model's first and last layer are updated so, all else by AdamW; a
weight that is several matrices, such as queries, keys and values, is updated matrix by matrix.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import sqrt
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.runtime.optimizers.adafactor import AdafactorStep
from windlass.runtime.optimizers.updates import Chunk, Hyperparameters, Scratch
from windlass.schema import NEWTON_SCHULZ_STEPS, OptimizerLaw

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


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that each iteration applies to all singular values. Source:
Jordan 2024."""
_TINY = 1e-7
"""Least norm that a matrix is divided by."""
_RMS = 0.2
"""Root mean square of AdamW's updates. Source: Liu et al. 2025, section 2.2."""


def momentum_update(moment: Tensor, gradient: Tensor, step: Hyperparameters) -> Tensor:
    """Updates the moment of a part of a matrix; returns what is to be made orthogonal, as new."""
    momentum = step.settings.momentum
    if step.clip_divisor is not None:
        gradient.div_(step.clip_divisor)
    moment.lerp_(gradient, 1 - momentum)
    return gradient.lerp(moment, momentum) if step.settings.nesterov else moment.clone()


def orthogonal(matrix: Tensor) -> Tensor:
    """`[rows columns]`: the matrix with all singular values near 1, by Newton-Schulz iterations.

    They run in bfloat16, as published; in float64 for a matrix of that type, for proofs.

    Args:
        matrix: `[rows columns]`.
    """
    a, b, c = _COEFFICIENTS
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def orthogonal_parts(weight: Tensor, rows: Sequence[int]) -> Tensor:
    """`[rows columns]`: each matrix of a weight made orthogonal, in the scale of the longest side.

    Queries, keys and values are matrices of their own, however they are stored.

    Args:
        weight: `[rows columns]`.
        rows: those of each matrix; none for a weight that is one matrix.
    """
    if not rows:
        return orthogonal(weight)
    columns = weight.size(1)
    longest = max(*rows, columns)
    parts = [
        orthogonal(part).mul_(sqrt(max(len(part), columns) / longest))
        for part in weight.split(list(rows))
    ]
    return torch.cat(parts)


def apply_orthogonal(
    master: Tensor, update: Tensor, longest: int, step: Hyperparameters
) -> None:  # fmt: skip
    """Updates a part of a matrix in place.

    Args:
        longest: the longest side of the whole matrix, or of the matrices that a weight is.
    """
    master.mul_(1 - step.host_rate * step.decay)
    master.add_(update, alpha=-step.host_rate * _RMS * sqrt(longest))
