"""Stand-ins for the blocks and the modules with weights of a model whose code runs around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PROBE_BATCH, PROBE_SEQUENCE = 11, 13
"""Sizes of the one run in which a module is studied: no model has them as a size of its own."""


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The shape and type of a tensor that a stand-in gives, found in the run that is studied."""

    sizes: tuple[int, ...]
    is_float: bool

    def fill(self, batch: int, sequence: int, like: Tensor) -> Tensor:
        """Zeros that take no memory, in the type of `like` if they are floating-point."""
        known = {PROBE_BATCH: batch, PROBE_SEQUENCE: sequence}
        dtype = torch.float32 if self.is_float else torch.int64
        return zeros_in_type_of([known.get(size, size) for size in self.sizes], like, dtype)


class EnoughError(Exception):
    """The hidden state is there that was asked for."""


class Frame:
    """What a slot does in one run; no part of a module, so that nothing is registered there."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all tensors and modules of a run."""
        self.call: Callable[..., Any] | None = None
        """Runs in place of the slot; None gives zeros, or passes the hidden state on."""
        self.like: Tensor | None = None
        """Zeros are of its type, on its device."""
        self.sizes = (0, 0)
        """Batch and sequence."""
        self.given: Tensor | None = None
        """A hidden state that takes the place of the one that arrives."""
        self.arrived: Tensor | None = None
        """The hidden state that arrived at a block."""
        self.left: Tensor | None = None
        """The hidden state that a block gave."""
        self.is_last = False
        """Whether the code behind it is not to run."""


class Slot(nn.Module):
    """Stands where a module with weights was: runs what it is given, else gives zeros."""

    def __init__(self, module: nn.Module, outputs: object) -> None:
        super().__init__()
        self.module = (module,)
        """The module on the meta device, whose settings code may read."""
        self.outputs = (outputs,)
        """What the module gave, with shapes for tensors; in a tuple, as no part of a module."""
        self.frame = Frame()

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the module's own
        """What the module would give."""
        frame = self.frame
        if frame.call is not None:
            return frame.call(*args, **kwargs)
        return _filled(self.outputs[0], *frame.sizes, frame.like)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  as the module's own
        """What the module has of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            call = self.__dict__["frame"].call
            if call is not None:
                return getattr(call, name)
            value = getattr(self.__dict__["module"][0], name)
            like = self.__dict__["frame"].like
            # Code that reads a weight, such as that of a tied head, gets zeros of its shape.
            is_weight = isinstance(value, Tensor) and like is not None
            return zeros_in_type_of(value.shape, like, value.dtype) if is_weight else value


def zeros_in_type_of(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory, in the type of `like` if theirs is floating-point."""
    own = like.dtype if dtype.is_floating_point else dtype
    return torch.zeros((), dtype=own, device=like.device).expand(*shape)


def _filled(value: Any, batch: int, sequence: int, like: Tensor | None) -> Any:  # noqa: ANN401
    """A structure with zeros in place of the shapes in it."""
    if isinstance(value, OutputShape) and like is not None:
        return value.fill(batch, sequence, like)
    if isinstance(value, tuple | list):
        return type(value)([_filled(each, batch, sequence, like) for each in value])
    return value


class BlockSlot(nn.Module):
    """Stands where a block was.

    It notes the hidden state that arrives, puts another one in its place if it is given one, and
    runs the block if it is given that; else it passes the hidden state on.
    """

    def __init__(self, block: nn.Module, place: int | str, rest: tuple[object, ...] | None) -> None:
        super().__init__()
        self.block = (block,)
        """The block on the meta device, whose settings code may read."""
        self.place = place
        """Where the hidden state stands among the arguments."""
        self.rest = rest
        """What the block gives beside it, with shapes for tensors; None if it gives one tensor."""
        self.frame = Frame()

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the block's own
        """What the block would give."""
        frame = self.frame
        x = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        frame.arrived = x
        if frame.is_last and frame.given is None:
            raise EnoughError
        if frame.given is not None:
            x = frame.given
        if frame.call is None:
            if self.rest is None:
                return x
            return (x, *_filled(self.rest, x.shape[0], x.shape[1], x))
        if isinstance(self.place, int):
            args = (*args[: self.place], x, *args[self.place + 1 :])
        else:
            kwargs = {**kwargs, self.place: x}
        output = frame.call(*args, **kwargs)
        frame.left = output if isinstance(output, Tensor) else output[0]
        if frame.is_last:
            raise EnoughError
        return output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  as the block's own
        """What the block has of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"][0], name)
