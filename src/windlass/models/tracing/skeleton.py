"""A module's own code around its blocks, run with stand-ins for all modules that have weights.

What blocks take beside the hidden state, such as rotary tables and masks, is made anew in each
layer by the code that makes it in the module, so that nothing of it is stored or passed on.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError

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
        dtype = like.dtype if self.is_float else torch.int64
        zero = torch.zeros((), dtype=dtype, device=like.device)
        return zero.expand([known.get(size, size) for size in self.sizes])


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
            return getattr(call if call is not None else self.__dict__["module"][0], name)


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
        return output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  as the block's own
        """What the block has of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"][0], name)


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """How a module is called with what the model takes."""

    path: str
    """The module; empty for the model itself."""
    tokens: str | int
    """The argument that takes the model's input."""
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    """All other arguments, which are no tensors."""

    def run(self, model: nn.Module, tokens: Tensor) -> Any:  # noqa: ANN401  as the module gives
        """What the module gives."""
        module = model.get_submodule(self.path)
        if isinstance(self.tokens, int):
            before, after = self.args[: self.tokens], self.args[self.tokens + 1 :]
            return module(*before, tokens, *after, **self.kwargs)
        return module(*self.args, **{**self.kwargs, self.tokens: tokens})


class Skeleton:
    """A model without weights, whose code runs around the blocks and ends that it is given.

    Args:
        model: has slots in place of all modules with weights.
        inner: how the innermost module is called in which the blocks are called.
        outer: how the model itself is called.
        logits: which of the leaves of the model's output are the logits.
        examples: shape of an input that is no token.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Caller,
        outer: Caller,
        *,
        logits: int,
        blocks: tuple[str, ...],
        ends: tuple[str, ...],
        examples: tuple[int, ...] | None,
    ) -> None:
        self._models = {torch.device("cpu"): model}
        self._slots: dict[torch.device, tuple[dict[str, Frame], tuple[Frame, ...]]] = {}
        self._inner, self._outer, self._logits = inner, outer, logits
        self._blocks, self._ends, self._examples = blocks, ends, examples

    def __deepcopy__(self, memo: dict[int, object]) -> "Skeleton":
        """Itself: it has no weights, and copies of a layer run the same code."""
        return self

    def hidden_after(
        self, block: Callable[..., Any], index: int, x: Tensor, token_ranks: int = 1
    ) -> Tensor:
        """The hidden state that arrives at the next block, or after the last one.

        Args:
            block: runs the block.
            index: its index.
            x: the hidden state before it.
            token_ranks: ranks of which each has an equal part of the sequence.
        """
        model, slots, blocks = self._on(x)
        tokens = self._dummy(x, token_ranks)
        self._size(slots, x, (x.shape[0], x.shape[1] * token_ranks))
        frame = blocks[index]
        frame.given, frame.call = x, block
        self._inner.run(model, tokens)
        is_last = index + 1 == len(blocks)
        result = self._present(frame.left if is_last else blocks[index + 1].arrived)
        self._clear(slots, blocks)
        return result

    @staticmethod
    def _present(hidden: Tensor | None) -> Tensor:
        if hidden is None:
            raise ModelError("a block that ran when the model was taken apart did not run now")
        return hidden

    def first_hidden(self, modules: Mapping[str, nn.Module], tokens: Tensor) -> Tensor:
        """The hidden state that arrives at the first block.

        Args:
            modules: modules with weights, by their path in the model.
            tokens: what the model takes.
        """
        like = next(p for module in modules.values() for p in module.parameters())
        model, slots, blocks = self._on(like)
        self._size(slots, like, tokens.shape)
        for path, module in modules.items():
            slots[path].call = module
        self._inner.run(model, tokens)
        result = self._present(blocks[0].arrived)
        self._clear(slots, blocks)
        return result

    def outputs(self, modules: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        """The logits for a hidden state after the last block.

        Args:
            modules: modules with weights, by their path in the model.
            x: the hidden state.
        """
        model, slots, blocks = self._on(x)
        self._size(slots, x, x.shape)
        for path, module in modules.items():
            slots[path].call = module
        blocks[-1].given = x
        output = self._outer.run(model, self._dummy(x))
        self._clear(slots, blocks)
        return tree_leaves(output)[self._logits]

    def _on(self, x: Tensor) -> tuple[nn.Module, dict[str, Frame], tuple[Frame, ...]]:
        """The model on the device of a tensor, with its slots."""
        device = x.device
        if device not in self._models:
            self._models[device] = copy.deepcopy(self._models[torch.device("cpu")]).to(device)
        model = self._models[device]
        if device not in self._slots:
            self._slots[device] = (
                {path: cast("Slot", model.get_submodule(path)).frame for path in self._ends},
                tuple(cast("BlockSlot", model.get_submodule(path)).frame for path in self._blocks),
            )
        # A run that raised has left what it was given.
        self._clear(*self._slots[device])
        return model, *self._slots[device]

    def _dummy(self, x: Tensor, token_ranks: int = 1) -> Tensor:
        """What stands for the input of the model where its numbers do not count."""
        if self._examples is not None:
            return torch.zeros((), dtype=x.dtype, device=x.device).expand(
                x.shape[0], *self._examples
            )
        sizes = (x.shape[0], x.shape[1] * token_ranks)
        return torch.zeros(sizes, dtype=torch.int64, device=x.device)

    def _size(self, slots: Mapping[str, Frame], like: Tensor, sizes: tuple[int, ...]) -> None:
        for frame in slots.values():
            frame.like, frame.sizes = like, (sizes[0], sizes[1])

    def _clear(self, slots: Mapping[str, Frame], blocks: tuple[Frame, ...]) -> None:
        for frame in (*slots.values(), *blocks):
            frame.clear()


class BlockInSkeleton(nn.Module):
    """A block around which the code of its module runs."""

    skeleton: tuple[Skeleton]
    """In a tuple, so that it is no part of the block."""
    index: int
    """Place of the block in whose slot it runs: the first of its kind."""
    token_ranks: int
    """Ranks that share the tokens of a sequence outside of attention and feed-forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.skeleton[0].hidden_after(super().forward, self.index, x, self.token_ranks)
