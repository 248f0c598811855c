"""Groups layers into kinds: layers of a kind are equal in types, shapes and settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from windlass.models.experts.routing import Router

T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every `nn.Module` has: parameters, buffers, children, hooks."""


def find_layer_kinds(layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """Names the kind of each layer; two layers share a kind if only their weights differ.

    The first layer, which takes tokens, and the last, which the loss follows, always have kinds of
    their own.
    """
    representatives: list[tuple[str, nn.Module]] = []
    names: list[str] = []
    for index, layer in enumerate(layers):
        at_end = index in (0, len(layers) - 1)
        name = None
        if not at_end:
            twins = (kind for kind, twin in representatives if same_modules(layer, twin))
            name = next(twins, None)
        if name is None:
            name = _unused(_snake_case(type(layer).__name__), names)
            if not at_end:
                representatives.append((name, layer))
        names.append(name)
    return tuple(names)


def split_kinds(kinds: Sequence[str], inputs: Sequence[torch.Size]) -> tuple[str, ...]:
    """The kinds of layers, of which those that take another shape have another kind.

    Args:
        inputs: shape of each layer's input, without the batch.
    """
    names: dict[tuple[str, torch.Size], str] = {}
    for key in zip(kinds, inputs, strict=True):
        if key not in names:
            taken = {*kinds, *names.values()}
            is_first = key[0] not in names.values()
            names[key] = key[0] if is_first else _unused(key[0], tuple(taken))
    return tuple(names[key] for key in zip(kinds, inputs, strict=True))


def is_embedding_only(layer: nn.Module) -> bool:
    """Whether a layer only looks up rows of embedding tables.

    Compiling such a layer gains nothing, and its gradient can be sparse: only the rows that were
    looked up.
    """
    leaves = [module for module in layer.modules() if not any(module.children())]
    return all(
        isinstance(leaf, (nn.Embedding, nn.Identity))
        or (isinstance(leaf, nn.Dropout) and leaf.p == 0)
        for leaf in leaves
    )


def running_statistics(layer: nn.Module) -> frozenset[str]:
    """The names of a layer's buffers that change in training: those of norms and of routers."""
    return norm_statistics(layer) | _buffers_of(layer, Router)


def norm_statistics(layer: nn.Module) -> frozenset[str]:
    """The names of a layer's buffers that change in every forward pass, as a batch norm's do."""
    return _buffers_of(layer, nn.modules.batchnorm._NormBase)  # noqa: SLF001  what all have in common


def _buffers_of(layer: nn.Module, kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in layer.named_modules()
        if isinstance(module, kind)
        for name, _ in module.named_buffers(recurse=False)
    )


def same_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are equal except for the values of parameters and buffers."""
    if type(one) is not type(other) or _has_hooks(one) or _has_hooks(other):
        return one is other
    return (
        one.training == other.training
        and _all_same(one._parameters, other._parameters, _same_metadata)  # noqa: SLF001
        and _all_same(one._buffers, other._buffers, _same_metadata)  # noqa: SLF001
        and _all_same(_settings(one), _settings(other), _same_value)
        and _all_same(one._modules, other._modules, _same_child)  # noqa: SLF001
    )


def _all_same(one: Mapping[str, T], other: Mapping[str, T], same: Callable[[T, T], bool]) -> bool:
    return list(one) == list(other) and all(same(one[name], other[name]) for name in one)


def _same_child(one: nn.Module | None, other: nn.Module | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_modules(one, other)


def _same_metadata(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.shape, one.dtype, one.stride(), one.requires_grad) == (
        other.shape, other.dtype, other.stride(), other.requires_grad,
    )  # fmt: skip


def _settings(module: nn.Module) -> dict[str, object]:
    """Attributes that the module's class sets, without parameters, buffers and children."""
    return {name: value for name, value in vars(module).items() if name not in _BASE_ATTRIBUTES}


def _same_value(one: object, other: object) -> bool:
    """Whether two settings are certainly equal.

    Values that cannot be compared count as different unless they are the same object.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not one.is_meta and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, _PLAIN):
        # NaN counts as equal to NaN: two layers built with it are alike.
        return one == other or (one != one and other != other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_value(one[k], other[k]) for k in one)
    if isinstance(one, partial) and isinstance(other, partial):
        return one.func is other.func and _same_value(
            (one.args, one.keywords), (other.args, other.keywords)
        )
    if is_dataclass(one) and not isinstance(one, type):
        return all(_same_value(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return False


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which are code and cannot be compared."""
    hooks = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    return any(isinstance(hook, dict) and hook for hook in hooks)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _unused(name: str, taken: Sequence[str]) -> str:
    """`block`, or `block2`, `block3`, ... if a different layer has that name already."""
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, len(taken) + 3) if f"{name}{i}" not in taken)
