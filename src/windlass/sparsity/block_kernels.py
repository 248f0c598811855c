"""The products of `block_linear` in C++, on the small matrix kernels of torch's own libraries."""

import ctypes
import logging
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import WindlassError
from windlass.sparsity.block_loops import require_blocks_inside
from windlass.sparsity.native_library import BuildProgress, build_native_library

_SOURCE = Path(__file__).with_name("block_linear.cpp")
KERNEL_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ltorch_cpu")
_FORWARD, _INPUT_GRAD, _WEIGHT_GRAD = range(3)
_DONE, _BAD_BLOCK = range(2)
_DTYPES = (torch.float32, torch.bfloat16)

_logger = logging.getLogger("windlass")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernels:
    """Compiled products."""

    library: ctypes.CDLL
    dtypes: tuple[torch.dtype, ...] = _DTYPES
    """Types of numbers that they take on this processor."""

    def linear(
        self, x: Tensor, values: Tensor, blocks: Tensor, out_features: int, bias: Tensor | None
    ) -> Tensor:
        """`x @ W.T + bias`, `[t out]`, of inputs `[t in]`."""
        y = x.new_empty((len(x), out_features))
        self._run(_FORWARD, _shape(y, x, values), (x, values), blocks, bias, y)
        return y

    def input_grad(self, gy: Tensor, values: Tensor, blocks: Tensor, in_features: int) -> Tensor:
        """`gy @ W`, `[t in]`, of gradients `[t out]`."""
        gx = gy.new_empty((len(gy), in_features))
        self._run(_INPUT_GRAD, _shape(gy, gx, values), (gy, values), blocks, None, gx)
        return gx

    def weight_grad(self, gy: Tensor, x: Tensor, blocks: Tensor, block: int) -> Tensor:
        """The kept blocks `[n B B]` of `gy.T @ x`, of `[t out]` and `[t in]`."""
        grad = gy.new_empty((len(blocks), block, block))
        self._run(_WEIGHT_GRAD, _shape(gy, x, grad), (gy, x), blocks, None, grad)
        return grad

    def _run(
        self,
        product: int,
        shape: "_Shape",
        factors: tuple[Tensor, Tensor],
        blocks: Tensor,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        size = ctypes.byref(shape)
        nbytes = self.library.windlass_block_workspace(product, out.itemsize, size)
        # Allocated by torch, whose allocator keeps and counts it.
        workspace = torch.empty(nbytes, dtype=torch.uint8)
        # Named, so that copies live until the call returns.
        given = [
            None if tensor is None else tensor.contiguous()
            for tensor in (*factors, blocks.to(torch.int32), bias, out, workspace)
        ]
        status = self.library.windlass_block_product(
            product, out.itemsize, size,
            *(None if tensor is None else tensor.data_ptr() for tensor in given),
        )  # fmt: skip
        if status == _BAD_BLOCK:
            require_blocks_inside(blocks, shape.out // shape.block, shape.in_ // shape.block)
        if status != _DONE:
            raise RuntimeError("a product of kept blocks failed")


class _Shape(ctypes.Structure):
    """Sizes of one product, as the C++ code reads them."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("tokens", "in_", "out", "count", "block"))


def _shape(outputs: Tensor, inputs: Tensor, values: Tensor) -> _Shape:
    return _Shape(len(inputs), inputs.shape[1], outputs.shape[1], len(values), values.shape[-1])


@dataclass(frozen=True)
class KernelFailure:
    """Why there are no compiled products."""

    reason: str


def load_block_kernels(
    progress: BuildProgress | None = None, *, warns: bool = True
) -> BlockKernels | KernelFailure:
    """The compiled products, built and loaded at the first call.

    Args:
        warns: whether a failure is logged, if this is the first call; else the caller reports it.
    """
    return _load(_FirstCall(progress, warns))


@dataclass(frozen=True)
class _FirstCall:
    """What the first caller wants; all calls are equal, since there is one build."""

    progress: BuildProgress | None = field(compare=False)
    warns: bool = field(compare=False)


@cache
def _load(call: _FirstCall) -> BlockKernels | KernelFailure:
    try:
        path = build_native_library(_SOURCE, flags=KERNEL_FLAGS, progress=call.progress)
        library = _declared(ctypes.CDLL(str(path)))
    except (WindlassError, OSError) as error:  # not built, or not of this torch
        if call.warns:
            _logger.warning("kept blocks are multiplied by a loop of `mm` in PyTorch: %s", error)
        return KernelFailure(str(error))
    every = BlockKernels(library=library)
    return replace(every, dtypes=tuple(dtype for dtype in _DTYPES if _computes(every, dtype)))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.windlass_block_workspace.argtypes = (number, number, pointer)
    library.windlass_block_workspace.restype = number
    library.windlass_block_product.argtypes = (number, number, *[pointer] * 7)
    library.windlass_block_product.restype = number
    return library


def _computes(kernels: BlockKernels, dtype: torch.dtype) -> bool:
    """Whether the kernels take these numbers here; bfloat16 asks for some instruction sets."""
    one = torch.ones(1, 1, 1, dtype=dtype).expand(1, 16, 16)
    try:
        kernels.linear(one[0], one, torch.zeros(1, 2, dtype=torch.int32), 16, None)
    except RuntimeError:
        return False
    return True
