"""Numerics of a process: deterministic kernels and TF32, which torch keeps as global settings."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from windlass.torch_ext.device import Device

_DETERMINISTIC_LIBRARIES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
"""What cuBLAS and NCCL take from the environment only: one workspace for each stream, and no sums
in the switch, whose order is not fixed. Sources: torch's note on reproducibility; Megatron-LM's
`--deterministic-mode`, which asks for such an NCCL_ALGO."""


def set_deterministic_libraries() -> None:
    """Lets cuBLAS and NCCL run deterministic algorithms only; before either is first used."""
    os.environ |= {
        name: os.environ.get(name, value) for name, value in _DETERMINISTIC_LIBRARIES.items()
    }


@contextmanager
def numerics(device: Device, *, deterministic: bool, tf32: bool) -> Iterator[None]:
    """Inside, torch runs deterministic kernels only, and products of float32 in TF32, as asked for.

    Args:
        deterministic: whether an operation without a deterministic kernel raises.
        tf32: whether matrix products may round float32 factors to TF32; only CUDA devices can.
    """
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    fill: Any = torch.utils.deterministic  # its attribute has no type
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        fill.fill_uninitialized_memory,
        cudnn.benchmark,
    )
    precision = products.fp32_precision
    if deterministic:
        if device.is_asynchronous:
            set_deterministic_libraries()
        torch.use_deterministic_algorithms(True)
        # It would fill each new tensor with NaN, at the speed of memory.
        fill.fill_uninitialized_memory = False
        cudnn.benchmark = False
    if tf32:
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        # Only then, because the call loads torch's compiler.
        if deterministic:
            enabled, warns, fill.fill_uninitialized_memory, cudnn.benchmark = before
            torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if tf32:
            products.fp32_precision = precision


def missing_deterministic_kernel(error: BaseException) -> str | None:
    """Torch's complaint that an operation has no deterministic kernel; None of another error."""
    first_line = str(error).partition("\n")[0]
    is_one = isinstance(error, RuntimeError) and "deterministic implementation" in first_line
    return first_line if is_one else None
