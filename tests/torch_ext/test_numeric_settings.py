"""Deterministic kernels and TF32: asked for inside, and as before outside."""

import pytest
import torch

from windlass.torch_ext import CpuDevice, missing_deterministic_kernel, numerics

CPU = CpuDevice(torch.device("cpu"))


def scatter_anyhow() -> None:
    """An operation without a deterministic kernel on any device."""
    torch.zeros(3).put_(torch.tensor([1, 1]), torch.ones(2))


def test_an_operation_without_a_deterministic_kernel_raises_inside_only():
    with numerics(CPU, deterministic=True, tf32=False):
        with pytest.raises(RuntimeError) as raised:
            scatter_anyhow()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    complaint = missing_deterministic_kernel(raised.value)
    assert complaint is not None
    assert complaint.startswith("put_ does not have a deterministic implementation")
    assert missing_deterministic_kernel(RuntimeError("out of memory")) is None
    scatter_anyhow()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("tf32", [False, True])
def test_products_of_float32_may_round_to_tf32_inside_only(tf32: bool):
    before = torch.backends.cuda.matmul.fp32_precision
    with numerics(CPU, deterministic=False, tf32=tf32):
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is tf32
    assert torch.backends.cuda.matmul.fp32_precision == before
