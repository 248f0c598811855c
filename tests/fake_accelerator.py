# ruff: noqa: ANN401  torch hands over operations and arguments of any type
"""A fake accelerator: whole steps run on tensors without data, and launches and waits are counted.

torch's `PrivateUse1` device is registered with a guard that does nothing, and its tensors are
FakeTensors: they have a shape, a type and a device, and an operation that mixes devices raises.
Tensors on the CPU are real. What a GPU would do is counted as the operations reach the dispatcher:
below autograd, and below what torch itself composes of other operations.

Registering a device changes torch for the whole process, so this is used in processes of its own.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from windlass.torch_ext import CpuDevice, Device, Stream
from windlass.torch_ext.streams import HostStream

_CHUNK_ELEMENTS, _MAX_CHUNKS = 65536, 320
_MAX_TENSORS = (110, 64, 48, 36, 30)
"""Limits of one multi-tensor kernel: elements of a chunk, chunks, and tensors by the number of
lists. Source: torch 2.13, `ATen/native/cuda/MultiTensorApply.cuh`, before CUDA 13, whose limits are
seven times as high."""

_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
     "_unsafe_view", "lift_fresh", "_values", "_indices", "is_coalesced", "sparse_dim", "dense_dim",
     "_sparse_coo_tensor_with_dims_and_tensors", "_has_compatible_shallow_copy_type", "set_",
     "_nnz", "_coalesced_", "resize_", "record_stream"}
)  # fmt: skip
"""Operations that launch nothing, beside views."""


class LaunchCount:
    """What a part of a step has asked of the device."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        """Kernels and asynchronous copies, by operation."""
        self.waits: Counter[str] = Counter()
        """How often the host waited for the device, by operation."""


class FakeAccelerator(TorchDispatchMode):
    """Runs operations on the fake device on tensors without data, and counts them.

    Numbers that the host reads from the device are 1. A read whose result would decide the shape of
    a tensor raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.counts: dict[str, LaunchCount] = {}
        """Counts, by the label that was set when an operation ran."""
        self.label = ""
        """What runs, such as an instruction."""
        self._transfers: set[int] = set()
        """Threads that submit work of their own, beside the step's and autograd's."""
        self.trace: list[tuple[str, str]] = []
        """The step's operations in order: name, and arguments with a tensor's shape and type in its
        place."""

    def __enter__(self) -> Self:
        # `torch.tensor` then copies to the device by an operation, which is counted.
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    @property
    def count(self) -> LaunchCount:
        """The counts of what runs now."""
        transfers = threading.get_ident() in self._transfers
        return self.counts.setdefault("transfers" if transfers else self.label, LaunchCount())

    def enter_thread(self) -> None:
        """Runs and counts the operations of another thread, until it ends."""
        self._transfers.add(threading.get_ident())
        self.__enter__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of an operation; without data if it is on the fake device."""
        del types
        if func is torch.ops.prim.device.default:
            return func(*args)
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        if not any(_is_on_fake_device(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            return self._communicate(name, func, args, kwargs)
        if func.namespace == "windlass":
            with self:  # what an operator of ours asks of the device counts, not the operator
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in one of ours torch has not taken its own apart
                return func.decompose(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.count.waits[name] += 1
            return torch.ones((), dtype=args[0].dtype).item()
        if name in ("_to_copy", "copy_") and len(_devices(leaves)) > 1:
            return self._copy(name, func, args, kwargs)
        args, kwargs = tree_map_only(Tensor, self._without_data, (args, kwargs))
        described = tree_map_only(Tensor, lambda t: (tuple(t.shape), str(t.dtype)), (args, kwargs))
        if threading.get_ident() not in self._transfers:
            self.trace.append((name, repr(described)))
        with self._fake:
            result = func(*args, **kwargs)
        if not func.is_view and name not in _NO_KERNEL:
            self.count.launches[name] += _kernels(name, args)
        return result

    def _communicate(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A collective or message of torch's fake process group, which sends nothing."""
        self.count.launches[name] += 1
        # The stand-in keeps the number of rows, because an exchange counts them.
        args, kwargs = tree_map_only(
            Tensor, lambda each: torch.empty((*each.shape[:1], 0)), (args, kwargs)
        )
        return func(*args, **kwargs)

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _copy(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A copy between the host and the device, for which the host waits unless told not to."""
        target = args[0]
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
        if blocks:
            self.count.waits[f"{name} between devices"] += 1
        self.count.launches["memcpy"] += 1
        args, kwargs = tree_map_only(Tensor, self._without_data, (args, kwargs))
        with self._fake:
            result = func(*args, **kwargs)
        if name == "_to_copy" and result.device.type == "cpu":
            return torch.ones(result.shape, dtype=result.dtype)
        return target if name == "copy_" else result


class FusedAttention(TorchFunctionMode):
    """Attention as the one kernel of a GPU; torch would compute it plainly on an unknown device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of a function."""
        del types
        kwargs = dict(kwargs or {})
        if func is not functional.scaled_dot_product_attention or args[0].device.type == "cpu":
            return func(*args, **kwargs)
        query, key, value = args
        if kwargs.get("enable_gqa"):
            groups = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, kwargs.get("is_causal", False))[0]


class FakeDevice(CpuDevice):
    """The fake accelerator as a run sees it: its streams have no work, as nothing is computed."""

    is_asynchronous = True
    piece_elements = Device.piece_elements

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.accelerator = FakeAccelerator()
        """Runs and counts the operations, while it is entered."""

    def activate(self) -> None:
        """Lets another thread run operations on the device too, until it ends."""
        self.accelerator.enter_thread()

    def current_stream(self) -> Stream:
        """The only stream; the host waits for it where it synchronizes."""
        return _FakeStream(self.accelerator)

    def synchronize(self) -> None:
        """Counts a wait."""
        self.accelerator.count.waits["synchronize"] += 1

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device, for which the host does not wait, as from pinned memory."""
        return tensor.to(self.torch_device, non_blocking=True)


class _FakeStream(HostStream):
    """A stream that has no work, and counts who waits for it."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator

    def synchronize(self) -> None:
        self._accelerator.count.waits["synchronize"] += 1


class _FakeModule:
    """What torch asks of the module of a device, such as `torch.cuda`."""

    default_generators = (torch.Generator(),)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False


def fake_device() -> FakeDevice:
    """Registers the fake accelerator as torch's device `fake`, and returns it."""
    _setup_privateuseone_for_python_backend("fake", backend_module=_FakeModule())
    return FakeDevice(torch.device("fake", 0))


def multi_tensor_kernels(sizes: Sequence[int], lists: int) -> int:
    """Kernels that CUDA launches for one call on lists of tensors.

    A kernel is full after 320 chunks of 65,536 elements, or as many tensors as its arguments hold.

    Args:
        sizes: elements of each tensor of a list.
        lists: number of lists that the kernel reads or writes.
    """
    kernels = chunks = tensors = 0
    for size in filter(None, sizes):
        tensors += 1
        left = -(-size // _CHUNK_ELEMENTS)
        while left:
            taken = min(left, _MAX_CHUNKS - chunks)
            chunks, left = chunks + taken, left - taken
            if chunks == _MAX_CHUNKS or (tensors == _MAX_TENSORS[lists - 1] and not left):
                kernels, chunks, tensors = kernels + 1, 0, int(left > 0)
    return kernels + (chunks > 0)


def _kernels(name: str, args: tuple[Any, ...]) -> int:
    """Kernels of an operation: one, or those of a call on lists of tensors."""
    if not name.startswith(("_foreach", "_fused")):
        return 1
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    tensors = [each for each in lists if isinstance(each[0], Tensor)]
    depth = 4 if name.startswith("_fused_adam") else len(tensors)
    kernels = multi_tensor_kernels([tensor.numel() for tensor in tensors[0]], depth)
    # A norm clears two buffers for the sums of chunks, and adds them up in a last kernel.
    return kernels + 3 if name == "_foreach_norm" else kernels


def _devices(leaves: Sequence[Any]) -> set[str]:
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return devices | {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}


def _is_on_fake_device(leaf: object) -> bool:
    if isinstance(leaf, FakeTensor):
        return True
    return isinstance(leaf, torch.device) and leaf.type == "fake"
