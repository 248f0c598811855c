"""Methods as compiled code: one piece of code for each object, whose shapes are fixed."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor


def compile_method(
    method: Callable[..., Tensor], owner: object, *, unknown_rows: bool = False
) -> Callable[..., Tensor]:
    """A method of one object as compiled code.

    Args:
        unknown_rows: whether an operator may give as many rows as it finds in a run. All other
            shapes never change.
    """
    own = MethodType(_with_own_code(method), owner)
    run: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False)
    return _with_unknown_rows(run) if unknown_rows else run


def _with_unknown_rows(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Importing the compiler takes a second, which eager runs would take too.
    from torch._dynamo import config as dynamo_config

    def call(*arguments: object) -> Tensor:
        with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
            return run(*arguments)

    return call


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with a code object of its own.

    torch.compile caches compiled code per code object, checks the guards of all its entries at each
    call, and gives up after eight entries: objects must not share a code object.
    """
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return cast("Callable[..., Tensor]", copy)
