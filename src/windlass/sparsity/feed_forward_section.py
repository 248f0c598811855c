"""The feed-forward of two weights of kept blocks with a GELU between them, as one operator.

What is saved for backward are the inner features before the activation alone: half of what both
layers would save one by one. The C++ code computes some tokens at a time, so that the inner
features are in the cache when they are read; elsewhere the same operator runs layer by layer.
"""

import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

from windlass.errors import WindlassError
from windlass.sparsity.block_kernels import KERNEL_FLAGS, BlockKernels, load_block_kernels
from windlass.sparsity.block_linear_ops import block_linear
from windlass.sparsity.block_loops import require_blocks_inside
from windlass.sparsity.block_sparse_linear import BlockSparseLinear
from windlass.sparsity.native_library import build_native_library

_SOURCE = Path(__file__).with_name("block_feed_forward.cpp")
_LANES, _MOST = 16, 128
"""Features that the C++ code activates at a time, of which blocks are multiples, and its largest
block."""
_DONE, _BAD_BLOCK = range(2)
_POINTERS = (
    "x", "gy", "up", "down", "up_bias", "down_bias", "up_blocks", "down_blocks", "hidden", "y",
    "gx", "up_grad", "down_grad", "up_bias_grad",
)  # fmt: skip

_logger = logging.getLogger("windlass")


def block_feed_forward(
    x: Tensor, up: nn.Module, down: nn.Module, *, approximate: str
) -> Tensor | None:
    """`down(gelu(up(x)))`, `[... d]`; None if the layers do not run as a section.

    They do if both are a whole `BlockSparseLinear` with blocks of one size that nothing watches: a
    tensor-parallel rank's are not, nor those whose mask is to be updated in this step.

    Args:
        x: inputs `[... d]`.
        up: from d to f features.
        down: from f to d features.
        approximate: how the GELU is computed, as torch names it: `none` or `tanh`.
    """
    if not (isinstance(up, BlockSparseLinear) and isinstance(down, BlockSparseLinear)):
        return None
    if not _runs_alone(up) or not _runs_alone(down) or up.block != down.block:
        return None
    weights = (up.values, up.blocks, up.bias, down.values, down.blocks, down.bias)
    wanted = (x, *weights)
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wanted)
    y: Tensor = _forward_op(x, *weights, up.out_features, approximate == "tanh", keeps)[0]
    return y


def _runs_alone(layer: BlockSparseLinear) -> bool:
    """Whether a layer is no rank's part of one, and nothing hooks into it."""
    return type(layer) is BlockSparseLinear and not layer._forward_hooks  # noqa: SLF001


@custom_op("windlass::block_feed_forward", mutates_args=())
def _forward_op(
    x: Tensor,
    up: Tensor,
    up_blocks: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_blocks: Tensor,
    down_bias: Tensor | None,
    inner: int,
    tanh: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs, and the inner features before the activation if they are kept."""
    kernels, width = _kernels(x, up, down), x.shape[-1]
    if kernels is None:
        hidden = block_linear(x, up, up_blocks, inner, up_bias)
        activated = functional.gelu(hidden, approximate=_approximate(tanh=tanh))
        y = block_linear(activated, down, down_blocks, width, down_bias)
        return y, hidden.view(-1) if keeps else x.new_empty(0)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    hidden = x.new_empty(x.numel() // width * inner if keeps else 0)
    tensors = {
        "x": x, "up": up, "up_blocks": up_blocks, "up_bias": up_bias, "down": down,
        "down_blocks": down_blocks, "down_bias": down_bias, "y": y,
    }  # fmt: skip
    _run(kernels, tensors | ({"hidden": hidden} if keeps else {}), inner, tanh=tanh)
    return y, hidden


@custom_op("windlass::block_feed_forward_grads", mutates_args=())
def _gradients_op(
    gy: Tensor,
    x: Tensor,
    hidden: Tensor,
    up: Tensor,
    up_blocks: Tensor,
    down: Tensor,
    down_blocks: Tensor,
    inner: int,
    tanh: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs, of both weights, and of the first bias."""
    kernels = _kernels(x, up, down)
    if kernels is None:
        return _gradients_by_layer(gy, x, hidden, (up, up_blocks, down, down_blocks), tanh=tanh)
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    up_grad, down_grad = torch.empty_like(up), torch.empty_like(down)
    up_bias_grad = torch.empty(inner, dtype=torch.float32)
    tensors = {
        "gy": gy, "x": x, "hidden": hidden, "up": up, "up_blocks": up_blocks, "down": down,
        "down_blocks": down_blocks, "gx": gx, "up_grad": up_grad, "down_grad": down_grad,
        "up_bias_grad": up_bias_grad,
    }  # fmt: skip
    _run(kernels, tensors, inner, tanh=tanh)
    return gx, up_grad, down_grad, up_bias_grad.to(x.dtype)


def _gradients_by_layer(
    gy: Tensor, x: Tensor, hidden: Tensor, weights: tuple[Tensor, ...], *, tanh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the op, one product after the other."""
    (up, up_blocks, down, down_blocks), ops = weights, torch.ops.windlass
    width, block = x.shape[-1], up.shape[-1]
    rows, features = gy.reshape(-1, width), hidden.view(-1, hidden.numel() * width // x.numel())
    approximate = _approximate(tanh=tanh)
    by_inner = ops.block_linear_input_grad(rows, down, down_blocks, features.shape[1])
    by_hidden = torch.ops.aten.gelu_backward(by_inner, features, approximate=approximate)
    activated = functional.gelu(features, approximate=approximate)
    return (
        ops.block_linear_input_grad(by_hidden, up, up_blocks, width).view(x.shape),
        ops.block_linear_weight_grad(by_hidden, x, up_blocks, block),
        ops.block_linear_weight_grad(rows, activated, down_blocks, block),
        by_hidden.sum(0),
    )


def _approximate(*, tanh: bool) -> str:
    return "tanh" if tanh else "none"


@_forward_op.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    *_, inner, _, keeps = arguments
    hidden = x.new_empty(x.numel() // x.shape[-1] * inner if keeps else 0)
    return x.new_empty(x.shape), hidden


@_gradients_op.register_fake
def _(
    gy: Tensor,  # noqa: ARG001
    x: Tensor,
    hidden: Tensor,  # noqa: ARG001
    up: Tensor,
    up_blocks: Tensor,  # noqa: ARG001
    down: Tensor,
    down_blocks: Tensor,  # noqa: ARG001
    inner: int,
    tanh: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(up), torch.empty_like(down), x.new_empty(inner)


def _save_inputs(
    ctx: Any,  # noqa: ANN401  torch's own context
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    x, up, up_blocks, _, down, down_blocks, _, ctx.inner, ctx.tanh, _ = inputs
    _, hidden = output
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, hidden, up, up_blocks, down, down_blocks)


def _backward(ctx: Any, gy: Tensor, _: None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad
    gx, up, down, up_bias = _gradients_op(gy, *saved, ctx.inner, ctx.tanh)
    down_bias = gy.reshape(-1, gy.shape[-1]).sum(0) if needs[6] else None
    return gx, up, None, up_bias if needs[3] else None, down, None, down_bias, None, None, None


_forward_op.register_autograd(_backward, setup_context=_save_inputs)


class _Sizes(ctypes.Structure):
    """Sizes of a section, as the C++ code reads them."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("tokens", "width", "inner", "up_count", "down_count", "block", "tanh")
    )


class _Kernels(NamedTuple):
    """The compiled section."""

    library: ctypes.CDLL


def _kernels(x: Tensor, up: Tensor, down: Tensor) -> _Kernels | None:
    """The compiled section; None if the numbers or the blocks are none that it takes."""
    block = up.shape[-1]
    if x.device.type != "cpu" or block % _LANES or block > _MOST or block != down.shape[-1]:
        return None
    products = load_block_kernels()
    has_kernel = isinstance(products, BlockKernels) and x.dtype in products.dtypes
    return _load() if has_kernel else None


@cache
def _load() -> _Kernels | None:
    try:
        library = ctypes.CDLL(str(build_native_library(_SOURCE, flags=KERNEL_FLAGS)))
    except (WindlassError, OSError) as error:
        _logger.warning("sparse feed-forwards run layer by layer: %s", error)
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.windlass_feed_forward_workspace.argtypes = (number, number, pointer)
    library.windlass_feed_forward_workspace.restype = number
    library.windlass_feed_forward.argtypes = (number, number, pointer, pointer, pointer)
    library.windlass_feed_forward.restype = number
    return _Kernels(library)


def _run(
    kernels: _Kernels, tensors: Mapping[str, Tensor | None], inner: int, *, tanh: bool
) -> None:
    """Runs the forward pass, or with an output `gx` the backward pass."""
    # Named, so that copies live until the call returns.
    given = {
        name: (tensor.to(torch.int32) if "blocks" in name else tensor).contiguous()
        for name, tensor in tensors.items()
        if tensor is not None
    }
    x, up, down, backward = given["x"], given["up"], given["down"], "gx" in given
    width, block = x.shape[-1], up.shape[-1]
    sizes = _Sizes(x.numel() // width, width, inner, len(up), len(down), block, tanh)
    pointers = (ctypes.c_void_p * len(_POINTERS))(
        *(given[name].data_ptr() if name in given else None for name in _POINTERS)
    )
    size, library = ctypes.byref(sizes), kernels.library
    nbytes = library.windlass_feed_forward_workspace(x.itemsize, backward, size)
    # Allocated by torch, whose allocator keeps and counts it.
    workspace = torch.empty(nbytes, dtype=torch.uint8)
    status = library.windlass_feed_forward(
        x.itemsize, backward, size, pointers, workspace.data_ptr()
    )
    if status == _BAD_BLOCK:
        require_blocks_inside(given["up_blocks"], inner // block, width // block)
        require_blocks_inside(given["down_blocks"], width // block, inner // block)
    if status != _DONE:
        raise RuntimeError("a feed-forward of kept blocks failed")
