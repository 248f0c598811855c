"""Labels that say of each tensor in a run what it is made of: the input, weights, or blocks."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INPUT = "the input"
_NEW = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Operators whose numbers do not depend on those of the tensor that they take."""
_QUESTIONS = frozenset({"_local_scalar_dense", "equal"})
"""Operators that give Python a number of a tensor."""
_DISPATCH = _python_dispatch.__file__
Site = tuple[str, int]
"""File and line of code."""


class Labels(TorchDispatchMode):
    """Says of each tensor what it is made of, and logs operations.

    Labels belong to storages, because views share them and are written through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, frozenset[str]] = {}
        self._kept: list[Tensor] = []
        """Keeps all storages, so that no address is used twice."""
        self._numbers: dict[int, object] = {}
        self._order: dict[int, int] = {}
        """In which order storages were first seen."""
        self._begin = 0
        self.answers: dict[Site, object] = {}
        """Numbers that the code has read from tensors, by the line that read them."""
        self._log: list[object] = []

    def of(self, value: object) -> frozenset[str]:
        """What a value is made of beside positions and constants."""
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return frozenset().union(*(self._labels.get(_key(leaf), frozenset()) for leaf in leaves))

    def put(self, tensor: Tensor, label: str) -> None:
        """Says that a tensor is what a label names, and nothing else."""
        self._keep(tensor)
        self._labels[_key(tensor)] = frozenset({label})

    def begin_log(self, names: Mapping[str, Tensor]) -> None:
        """Begins a new log, in which some tensors have names, and others that exist have their own.

        Args:
            names: tensors by the name that stands for them.
        """
        self._log, self._begin = [], len(self._order)
        self._numbers = {_key(tensor): name for name, tensor in names.items()}

    def end_log(self) -> tuple[object, ...]:
        """All operations since the log began, with tensors by number."""
        return tuple(self._log)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever ATen takes and gives
        del types
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        out = _numbers_alone(func, name, args, kwargs) if name in _NEW else func(*args, **kwargs)
        if name in _QUESTIONS:
            self.answers[_site()] = out
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for each in outputs:
            self._keep(each)
        if name not in _NEW:
            label = self.of((args, kwargs))
            if label:
                mutates = func._schema.is_mutable  # noqa: SLF001  there is no public way to ask
                written = args[:1] if mutates else ()
                for each in (*outputs, *(t for t in tree_leaves(written) if isinstance(t, Tensor))):
                    self._labels[_key(each)] = self._labels.get(_key(each), frozenset()) | label
        self._log.append((str(func), self._names(args), self._names(kwargs), self._names(out)))
        return out

    def _keep(self, tensor: Tensor) -> None:
        self._order.setdefault(_key(tensor), len(self._order))
        self._kept.append(tensor)

    def _names(self, value: object) -> object:
        if isinstance(value, Tensor):
            key = _key(value)
            is_older = self._order.get(key, -1) < self._begin
            number = self._numbers.setdefault(
                key, ("outside", key) if is_older else len(self._numbers)
            )
            return number, tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, tuple | list):
            return tuple(self._names(each) for each in value)
        if isinstance(value, dict):
            return tuple((key, self._names(each)) for key, each in value.items())
        return value


class KnownAnswers(TorchDispatchMode):
    """Gives code that reads numbers of fake tensors those that it read where they had numbers.

    Args:
        answers: by the line that read them.
    """

    def __init__(self, answers: Mapping[Site, object]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever ATen takes and gives
        del types
        if func.overloadpacket.__name__ in _QUESTIONS:
            site = _site()
            if site in self._answers:
                return self._answers[site]
        return func(*args, **(kwargs or {}))


def _site() -> Site:
    """The innermost line of code outside of this file and of what dispatches operators."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in (__file__, _DISPATCH):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _numbers_alone(
    func: OpOverload, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """A new tensor with numbers, like or beside a tensor that has none."""
    source: Tensor = args[0]
    if not isinstance(source, FakeTensor):
        return func(*args, **kwargs)
    like = (
        torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        if name.endswith("_like")
        else torch.empty((), dtype=source.dtype)
    )
    return func(like, *args[1:], **kwargs)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001  its address
