"""Muon: the momentum of a whole matrix, made nearly orthogonal.

    m <- momentum m + (1 - momentum) g
    u = (1 - momentum) g + momentum m, or m without `nesterov`
    w <- (1 - rate decay) w - 0.2 sqrt(max(rows, columns)) rate orthogonal(u)

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the factor, with which an
update is as large as AdamW's and takes its learning rate, Liu et al. 2025, arXiv:2502.16982,
equation 4. Matrices between a model's first and last layer are updated so, all else by AdamW; a
weight that is several matrices, such as queries, keys and values, is updated matrix by matrix.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from windlass.runtime.optimizers.updates import Hyperparameters
from windlass.schema import NEWTON_SCHULZ_STEPS

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


def apply(
    master: Tensor, update: Tensor, longest: int, step: Hyperparameters
) -> None:  # fmt: skip
    """Updates a part of a matrix in place.

    Args:
        longest: the longest side of the whole matrix, or of the matrices that a weight is.
    """
    master.mul_(1 - step.host_rate * step.decay)
    master.add_(update, alpha=-step.host_rate * _RMS * sqrt(longest))
