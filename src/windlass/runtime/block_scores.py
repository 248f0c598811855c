"""Scores of absent blocks for RigL: squared norms of a weight's dense gradient, block by block.

They arrive as the gradient of an input of the layer, which changes nothing in the forward pass. So
they are part of compiled code, of recomputation and of split backward passes like any gradient, and
a flag decides at each step whether they are computed. The dense gradient never exists whole: it is
computed some rows of blocks at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from windlass.runtime.optimizer_state.optimizer_state import wide_dtype
from windlass.sparsity import BlockSparseLinear

_STRIP_ELEMENTS = 2**21
"""Most elements of the dense gradient that exist at a time: 8 MiB in float32."""


class BlockScores:
    """The scores of one layer type, which its template computes in the backward pass.

    Args:
        template: the module that computes; its sparse linear layers are given an input more.
    """

    def __init__(self, template: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        # On the host, so that the operator reads it without waiting for the device.
        self._active = torch.zeros((), dtype=torch.bool)
        self.leaves: tuple[Tensor, ...] = tuple(
            self._watch(module, device, dtype)
            for module in template.modules()
            if isinstance(module, BlockSparseLinear)
        )
        """`Float[rows columns]` each: the inputs whose gradients are the scores, in the order of
        the template's sparse layers."""

    def _watch(self, module: BlockSparseLinear, device: torch.device, dtype: torch.dtype) -> Tensor:
        grid = (module.out_features // module.block, module.in_features // module.block)
        leaf = torch.zeros(grid, dtype=dtype, device=device).requires_grad_()
        module.register_buffer("scores", leaf, persistent=False)
        module.register_buffer("scores_active", self._active, persistent=False)
        module.register_forward_hook(_score_blocks)
        return leaf

    def activate(self, *, active: bool) -> None:
        """Says whether the backward passes from now on compute scores; else they are zero."""
        self._active.fill_(active)


def _score_blocks(module: BlockSparseLinear, arguments: tuple[Tensor], y: Tensor) -> Tensor:
    """A forward hook: the output itself, whose gradient also gives the scores."""
    result: Tensor = _ScoreBlocks.apply(
        y, arguments[0], module.scores, module.scores_active, module.block
    )
    return result


class _ScoreBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own context
        y: Tensor,
        x: Tensor,
        scores: Tensor,  # noqa: ARG004
        active: Tensor,
        block: int,
    ) -> Tensor:
        ctx.save_for_backward(x, active)
        ctx.block = block
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gy,) = gradients
        x, active = ctx.saved_tensors
        return gy, None, _block_scores(gy, x, active, ctx.block), None, None


@custom_op("windlass::block_scores", mutates_args=())
def _block_scores(gy: Tensor, x: Tensor, active: Tensor, block: int) -> Tensor:
    """`Float[rows columns]`: squared norms of the blocks of `gy.T @ x`; zeros if not active."""
    rows, columns = gy.shape[-1] // block, x.shape[-1] // block
    scores = torch.zeros(rows, columns, dtype=wide_dtype(gy.dtype), device=x.device)
    if not active:
        return scores
    outputs, inputs = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
    strip = max(1, _STRIP_ELEMENTS // (block * inputs.shape[1]))
    for first in range(0, rows, strip):
        part = outputs[:, first * block : (first + strip) * block]
        gradient = (part.T @ inputs).view(-1, block, columns, block)
        scores[first : first + strip] = gradient.to(scores.dtype).square_().sum((1, 3))
    return scores


@_block_scores.register_fake
def _(gy: Tensor, x: Tensor, active: Tensor, block: int) -> Tensor:  # noqa: ARG001
    shape = gy.shape[-1] // block, x.shape[-1] // block
    return x.new_empty(shape, dtype=wide_dtype(gy.dtype))


def block_norms(values: Tensor) -> Tensor:
    """`Float[n]`: norm of each of some blocks, `[n B B]`, in float32 at least."""
    dtype = wide_dtype(values.dtype)
    return torch.linalg.vector_norm(values.detach(), dim=(1, 2), dtype=dtype)
