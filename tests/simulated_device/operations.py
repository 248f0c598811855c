# ruff: noqa: ANN401  torch hands over operations and arguments of any type
"""Operations: what torch asks of the simulated device, put off into a stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from simulated_device.collectives import Collectives
from simulated_device.memory import Access, Allocation, allocate
from simulated_device.simulation import Simulation
from simulated_device.tensor import DEVICE, SimulatedTensor, byte_span, inner_of

_aten = torch.ops.aten

_CPU = torch.device("cpu")

_UNINITIALIZED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""They allocate, and no work is submitted."""

_RANDOM_IN_PLACE = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
"""They draw when they are asked for, so that generators are those of a plain run."""

_NEEDS_VALUES = (
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2",
    "coalesce", "_coalesce", "bernoulli", "native_dropout",
)  # fmt: skip
"""They make the host wait for the current stream, as on a GPU."""


class Operations(TorchDispatchMode):
    """Puts operations on simulated tensors off; active in every thread that has activated it.

    Args:
        simulation: the streams that they run in.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._shapes: dict[object, Any] = {}
        """Results of operations on zeros, by what decides their shapes."""
        self._pinned: list[Allocation] = []
        self._collectives = Collectives(simulation)

    # Pinned memory of the host.

    def pin(self, buffer: Tensor) -> None:
        """From now on copies from and to this memory run late."""
        stream = self._simulation.streams[0]
        self._pinned.append(Allocation(stream, buffer, None))

    def unpin(self, buffer: Tensor) -> None:
        """Ends that; reports a copy that may still run."""
        pinned = self._pinned_part(buffer)
        if pinned is None:
            raise RuntimeError("this memory is not pinned")
        begin, end = byte_span(buffer)
        access = Access(pinned, begin, end, writes=True)
        self._simulation.host_access([access], "unregister_host_memory")
        self._pinned.remove(pinned)

    def _pinned_part(self, tensor: Tensor) -> Allocation | None:
        if not self._pinned or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage().data_ptr()
        for pinned in self._pinned:
            if pinned.content.untyped_storage().data_ptr() == storage:
                return pinned
        return None

    # Dispatch.

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of an operation; the host's own run at once."""
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        if kwargs.get("device") == DEVICE or any(isinstance(x, SimulatedTensor) for x in leaves):
            return self.call(func, args, kwargs)
        if self._simulation.is_running():
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self._collectives.finish()
        if self._pinned:
            self._check_host(func, args, leaves)
        return func(*args, **kwargs)

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operation on simulated tensors, or that makes some."""
        with self._simulation.lock:
            name = func._schema.name.removeprefix("aten::")
            if func.namespace == "c10d":
                return self._collectives.call(func, args, kwargs)
            if (rows := self._rows(name, func, args, kwargs)) is not None:
                return rows
            is_sparse = _is_sparse(args, kwargs)
            if name in ("_to_copy", "copy_") and not is_sparse:
                return self._copied(name, func, args, kwargs)
            if name in _NEEDS_VALUES or is_sparse:
                return self._with_values(func, args, kwargs)
            if name in _UNINITIALIZED:
                return self._empty(func, args, kwargs)
            if func.is_view:
                return self._view(func, args, kwargs)
            if not any(isinstance(x, SimulatedTensor) for x in tree_leaves((args, kwargs))):
                return self._filled(func(*args, **kwargs | {"device": _CPU}), name)
            if name in _RANDOM_IN_PLACE:
                return self._drawn(func, args, kwargs)
            return self._put_off(func, args, kwargs, name)

    def _rows(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A sparse tensor made of indices and values, or one of both; None for all other work.

        It holds the tensors themselves, so that nothing waits for them, as on a GPU.
        """
        if name == "_sparse_coo_tensor_with_dims_and_tensors":
            indices, values = args[3], args[4]
            inner = func(*tree_map(inner_of, args), **kwargs | {"device": _CPU})
            rows = SimulatedTensor(inner, values.allocation, self)
            rows.rows = indices, values
            return rows
        if name in ("_indices", "_values") and args[0].rows is not None:
            return args[0].rows[name == "_values"]
        return None

    def _check_host(self, func: Any, args: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Reports an operation of the host on pinned memory that a copy may still use."""
        if func.is_view:
            return
        written = _written(func, args, {})
        for tensor in leaves:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                pinned = self._pinned_part(tensor)
                if pinned is not None:
                    begin, end = byte_span(tensor)
                    access = Access(pinned, begin, end, any(tensor is w for w in written))
                    self._simulation.host_access([access], str(func))

    # Tensors.

    def _new(self, like: Tensor) -> SimulatedTensor:
        """A new tensor of the same shape, with strides, whose memory holds nothing."""
        nbytes = like.untyped_storage().nbytes() if like.numel() else 0
        stream = self._simulation.current_stream()
        allocation = allocate(stream, nbytes, like.dtype, self._simulation)
        storage = allocation.content.untyped_storage()
        inner = torch.empty(0, dtype=like.dtype).set_(
            storage, like.storage_offset(), like.shape, like.stride()
        )
        return SimulatedTensor(inner, allocation, self)

    def _wrap(self, inner: Any, allocation: Allocation) -> Any:
        return SimulatedTensor(inner, allocation, self) if isinstance(inner, Tensor) else inner

    def _empty(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        host = kwargs.get("device") not in (None, DEVICE)
        shape = func(*tree_map(inner_of, args), **kwargs | {"device": _CPU})
        return shape if host else self._new(shape)

    def _view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        base = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, SimulatedTensor))
        inner = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        out = tree_map(lambda x: self._wrap(x, base.allocation), inner)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def _filled(self, value: Any, name: str) -> Any:
        """Tensors of values that are known already, which arrive late."""

        def fill(content: Any) -> Any:
            if not isinstance(content, Tensor):
                return content
            out = self._new(content)
            inner = out.inner
            self._submit(lambda: inner.copy_(content), [out.access(writes=True)], name)
            return out

        return tree_map(fill, value)

    def _drawn(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._simulation.require_no_recording()
        target = args[0]
        content = func(torch.zeros_like(target.inner), *args[1:], **kwargs)
        inner = target.inner
        self._submit(lambda: inner.copy_(content), [target.access(writes=True)], str(func))
        return target

    # Work.

    def _submit(self, run: Callable[[], object], accesses: list[Access], name: str) -> None:
        self._simulation.submit(lambda: (run(), None)[1], accesses, name)

    def _put_off(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
        """The result of an operation that runs later."""
        args, kwargs = tree_map(_snapshot_number, (tuple(args), kwargs))
        written = _written(func, args, kwargs)
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SimulatedTensor)]
        accesses = [x.access(writes=any(x is w for w in written)) for x in leaves]
        inner_args, inner_kwargs = tree_map(inner_of, (args, kwargs))
        results = func._schema.returns
        if written and all(r.alias_info is not None for r in results):
            self._submit(lambda: func(*inner_args, **inner_kwargs), accesses, name)
            return return_and_correct_aliasing(func, args, kwargs, _first_or_all(written, results))
        shapes = self._shapes_of(func, args, kwargs)
        out = tree_map(lambda x: self._new(x) if isinstance(x, Tensor) else x, shapes)
        targets = [x for x in tree_leaves(out) if isinstance(x, SimulatedTensor)]
        accesses += [x.access(writes=True) for x in targets]
        into = [x.inner for x in targets]

        def run() -> None:
            result = func(*inner_args, **inner_kwargs)
            values = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            for target, value in zip(into, values, strict=True):
                target.copy_(value)

        self._submit(run, accesses, name)
        return out

    def _shapes_of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operation returns for zeros: the shapes and strides of its results."""
        leaves, form = tree_flatten((args, kwargs))
        key = (func, form, tuple(_shape_key(x) for x in leaves))
        if key not in self._shapes:
            zeros = tree_map(_zeros, (args, kwargs))
            self._shapes[key] = func(*zeros[0], **zeros[1])
        return self._shapes[key]

    def _with_values(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operation whose shape depends on values: the host waits for them."""
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SimulatedTensor)]
        written = _written(func, args, kwargs)
        accesses = [x.access(writes=any(x is w for w in written)) for x in leaves]
        self._simulation.submit(lambda: None, accesses, str(func))
        self._simulation.finish_current()
        if "device" in kwargs:
            kwargs = kwargs | {"device": _CPU}
        inner_args, inner_kwargs = tree_map(inner_of, (tuple(args), kwargs))
        result = func(*inner_args, **inner_kwargs)
        if written:
            return return_and_correct_aliasing(
                func, args, kwargs, _first_or_all(written, func._schema.returns)
            )
        stream = self._simulation.current_stream()
        return tree_map(lambda x: self._finished(x, stream), result)

    def _finished(self, value: Any, stream: Any) -> Any:
        """A tensor that the host has waited for."""
        if not isinstance(value, Tensor):
            return value
        if value.layout == torch.strided:
            return self._filled(value, "result")
        # A copy, because what it was made of is given back when its own tensors go.
        return SimulatedTensor(value.clone(), Allocation(stream, torch.empty(1), None), self)

    # Copies.

    def _copied(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A copy within the device, or between it and the host."""
        waits = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if name == "copy_":
            target, source = args[0], args[1]
            self._transfer(target, source, waits=waits)
            return target
        source, device = args[0], kwargs.get("device")
        device = source.device if device is None else device
        if device == DEVICE and isinstance(source, SimulatedTensor):
            return self._put_off(func, args, kwargs | {"device": None}, name)
        kwargs = {k: v for k, v in kwargs.items() if k != "non_blocking"} | {"device": _CPU}
        shape = func(inner_of(source), **kwargs)
        if device == DEVICE:
            target = self._new(shape)
            self._transfer(target, source, waits=waits)
            return target
        target = torch.empty_like(shape)
        self._transfer(target, source, waits=True)
        return target

    def _transfer(self, target: Tensor, source: Tensor, *, waits: bool) -> None:
        on_device = [isinstance(x, SimulatedTensor) for x in (target, source)]
        into, out_of = inner_of(target), inner_of(source)
        accesses = []
        for tensor, writes in ((target, True), (source, False)):
            if isinstance(tensor, SimulatedTensor):
                accesses.append(tensor.access(writes=writes))
            elif (pinned := self._pinned_part(tensor)) is not None:
                accesses.append(Access(pinned, *byte_span(tensor), writes))
            elif writes:
                waits = True  # a copy to pageable memory ends before the call returns
            else:
                self._simulation.require_no_recording()
                out_of = out_of.clone()  # one from there has left it
        self._submit(lambda: into.copy_(out_of), accesses, "copy")
        if waits and not all(on_device):
            self._simulation.finish_current()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes."""
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return written


def _first_or_all(written: Sequence[Tensor], results: Sequence[Any]) -> Any:
    if not results:
        return None
    return written[0] if len(results) == 1 else tuple(written)


def _is_sparse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    leaves = tree_leaves((args, kwargs))
    if any(isinstance(x, SimulatedTensor) and x.layout != torch.strided for x in leaves):
        return True
    return kwargs.get("layout") == torch.sparse_coo


def _snapshot_number(value: Any) -> Any:
    """A number of the host, which an operation takes along; a tensor of the host is refused."""
    if isinstance(value, Tensor) and not isinstance(value, SimulatedTensor):
        if value.dim():
            raise RuntimeError("an operation mixes tensors of the host and of the device")
        return value.clone()
    return value


def _shape_key(value: Any) -> object:
    if isinstance(value, SimulatedTensor):
        return (value.shape, value.inner.stride(), value.dtype)
    return (value.dtype,) if isinstance(value, Tensor) else (type(value), repr(value))


def _zeros(value: Any) -> Any:
    if not isinstance(value, SimulatedTensor):
        return value
    inner = value.inner
    return torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype).zero_()
