# ruff: noqa: ANN401  torch hands over operations and arguments of any type
"""SimulatedTensor: a tensor in the memory of the simulated device."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from simulated_device.memory import Access, Allocation

if TYPE_CHECKING:
    from simulated_device.operations import Operations

DEVICE = torch.device("cpu", 1)
"""Its operations take the kernels of a CPU, and torch tells it from the host's `cpu`."""


class SimulatedTensor(Tensor):
    """A tensor whose elements arrive late.

    Args:
        inner: the elements, on the CPU.
        allocation: the memory that holds them.
        operations: what puts operations on it off.
    """

    inner: Tensor
    allocation: Allocation
    operations: "Operations"
    rows: "tuple[SimulatedTensor, SimulatedTensor] | None"
    """Indices and values of a sparse tensor that nobody has waited for; None of any other."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(  # noqa: PYI034  a wrapper is made of nothing else
        cls: type["SimulatedTensor"],
        inner: Tensor,
        allocation: Allocation,
        operations: "Operations",
    ) -> "SimulatedTensor":
        strides, offset = (
            (inner.stride(), inner.storage_offset())
            if inner.layout == torch.strided
            else (None, None)
        )
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=strides, storage_offset=offset, dtype=inner.dtype,
            layout=inner.layout, device=DEVICE,
        )  # fmt: skip
        made.inner, made.allocation, made.operations = inner, allocation, operations
        made.rows = None
        return made

    @property
    def is_cpu(self) -> bool:
        """False, so that the library takes the way of an accelerator."""
        return False

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Its elements, once they are there."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of an operation, which is put off."""
        leaves = tree_leaves((args, kwargs))
        operations = next(x for x in leaves if isinstance(x, SimulatedTensor)).operations
        return operations.call(func, args, dict(kwargs or {}))

    def access(self, *, writes: bool) -> Access:
        """The bytes between its first and its last element."""
        begin, end = byte_span(self.inner)
        return Access(self.allocation, begin, end, writes)


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """Offsets in its storage of a tensor's first byte and of the one after its last."""
    if tensor.layout != torch.strided:
        return 0, 1
    size, begin = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return begin * size, begin * size
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def inner_of(value: Any) -> Any:
    """The elements of a simulated tensor; anything else as it is."""
    return value.inner if isinstance(value, SimulatedTensor) else value
