"""Which layers are of one kind: equal in types, shapes and settings, all the way down."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_OWN_OF_MODULE = frozenset(vars(nn.Module()))


def kinds_of(layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """A kind's name for each layer; layers share one only if nothing tells them apart but values.

    The first layer, which takes tokens, and the last, which the loss follows, are kinds of their
    own whatever they look like.
    """
    found: list[tuple[str, nn.Module]] = []
    names: list[str] = []
    for index, layer in enumerate(layers):
        at_end = index in (0, len(layers) - 1)
        name = None if at_end else next((n for n, twin in found if _same(layer, twin)), None)
        if name is None:
            name = _fresh(_snake(type(layer).__name__), names)
            if not at_end:
                found.append((name, layer))
        names.append(name)
    return tuple(names)


def only_looks_up(layer: nn.Module) -> bool:
    """Whether all that a layer is made of are tables of rows.

    Compiling it gains nothing, and its gradient can come as the rows that were asked for.
    """
    leaves = [module for module in layer.modules() if not any(module.children())]
    return all(
        isinstance(leaf, (nn.Embedding, nn.Identity))
        or (isinstance(leaf, nn.Dropout) and leaf.p == 0)
        for leaf in leaves
    )


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Equal but for the numbers inside parameters and buffers."""
    if type(one) is not type(other) or _hooked(one) or _hooked(other):
        return one is other
    return (
        one.training == other.training
        and _all_same(one._parameters, other._parameters, _same_form)  # noqa: SLF001
        and _all_same(one._buffers, other._buffers, _same_form)  # noqa: SLF001
        and _all_same(_settings(one), _settings(other), _same_value)
        and _all_same(one._modules, other._modules, _same_child)  # noqa: SLF001
    )


def _all_same(one: Mapping[str, T], other: Mapping[str, T], same: Callable[[T, T], bool]) -> bool:
    return list(one) == list(other) and all(same(one[name], other[name]) for name in one)


def _same_child(one: nn.Module | None, other: nn.Module | None) -> bool:
    if one is None or other is None:
        return one is other
    return _same(one, other)


def _same_form(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.shape, one.dtype, one.stride(), one.requires_grad) == (
        other.shape, other.dtype, other.stride(), other.requires_grad,
    )  # fmt: skip


def _settings(module: nn.Module) -> dict[str, object]:
    """What the module's author has set, apart from parameters, buffers and children."""
    return {name: value for name, value in vars(module).items() if name not in _OWN_OF_MODULE}


def _same_value(one: object, other: object) -> bool:
    """Equal for certain; what cannot be compared counts as different unless it is one object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not one.is_meta and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, _PLAIN):
        # A setting that is no number equals itself here, as two layers made alike are alike.
        return one == other or (one != one and other != other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_value(one[k], other[k]) for k in one)
    if is_dataclass(one) and not isinstance(one, type):
        return all(_same_value(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return False


def _hooked(module: nn.Module) -> bool:
    """A hook is code that cannot be compared."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return any(isinstance(hook, dict) and hook for hook in hooks)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _fresh(name: str, taken: Sequence[str]) -> str:
    """`block`, or `block2`, `block3`, ... if that is taken by a layer that differs."""
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, len(taken) + 3) if f"{name}{i}" not in taken)
