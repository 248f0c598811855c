"""A module's own code around its blocks, run with stand-ins for all modules that have weights.

What blocks take beside the hidden state, such as rotary tables and masks, is made anew in each
layer by the code that makes it in the module, so that nothing of it is stored or passed on.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable
from windlass.models.tracing.labels import KnownAnswers, Site
from windlass.models.tracing.slots import BlockSlot, EnoughError, Frame, Slot, zeros_in_type_of


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
    targets: str | None = None
    """The argument that takes targets, whose numbers do not count; None passes none."""

    def run(self, model: nn.Module, tokens: Tensor) -> Any:  # noqa: ANN401  as the module gives
        """What the module gives."""
        module = model.get_submodule(self.path)
        kwargs = dict(self.kwargs)
        if self.targets is not None:
            kwargs[self.targets] = torch.zeros_like(tokens)
        if isinstance(self.tokens, int):
            before, after = self.args[: self.tokens], self.args[self.tokens + 1 :]
            return module(*before, tokens, *after, **kwargs)
        return module(*self.args, **{**kwargs, self.tokens: tokens})


class Skeleton:
    """A model without weights, whose code runs around the blocks and ends that it is given.

    Args:
        model: has slots in place of all modules with weights.
        inner: how the innermost module is called in which the blocks are called.
        outer: how the model itself is called.
        logits: which of the leaves of the model's output are the logits.
        blocks: paths of the blocks.
        ends: paths of the other modules with weights.
        tensors: shapes and types of the weights that no such module has, by their path.
        stops: whether code behind the blocks reads weights, and runs in the last layer alone.
        answers: numbers that the code read from its own tensors, which fake ones do not have.
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
        tensors: Mapping[str, Tensor],
        stops: bool,
        answers: Mapping[Site, object],
        examples: tuple[int, ...] | None,
    ) -> None:
        self._models = {torch.device("cpu"): model}
        self._slots: dict[torch.device, tuple[dict[str, Frame], tuple[Frame, ...]]] = {}
        self._inner, self._outer, self._logits = inner, outer, logits
        self._blocks, self._ends, self._examples = blocks, ends, examples
        self._tensors, self._stops = tensors, stops
        self._answers = answers

    def __deepcopy__(self, memo: dict[int, object]) -> "Skeleton":
        """Itself: it has no weights, and copies of a layer run the same code."""
        return self

    def train(self, mode: bool) -> None:
        """Puts the code around the blocks into training or evaluation mode."""
        for model in self._models.values():
            if model.training != mode:
                model.train(mode)

    def hidden_after(
        self, block: Callable[..., Any], index: int, x: Tensor, token_ranks: int = 1
    ) -> Tensor:
        """The hidden state that arrives at the next block, or after the last one.

        Args:
            token_ranks: ranks of which each has an equal part of the sequence.
        """
        sizes = (x.shape[0], x.shape[1] * token_ranks)
        is_last = index + 1 == len(self._blocks)

        def fill(blocks: tuple[Frame, ...]) -> None:
            blocks[index].given, blocks[index].call = x, block
            blocks[index if is_last else index + 1].is_last = self._stops

        blocks, _ = self._run(self._inner, {}, x, self._dummy(x, token_ranks), sizes, fill)
        return _present(blocks[index][1] if is_last else blocks[index + 1][0])

    def first_hidden(self, parts: Mapping[str, nn.Module | Tensor], tokens: Tensor) -> Tensor:
        """The hidden state that arrives at the first block.

        Args:
            parts: modules with weights, and other weights, by their path in the model.
        """
        like = next(tensor for part in parts.values() for tensor in _floats(part))

        def fill(blocks: tuple[Frame, ...]) -> None:
            blocks[0].is_last = self._stops

        sizes = (tokens.shape[0], tokens.shape[1])
        blocks, _ = self._run(self._inner, parts, like, tokens, sizes, fill)
        return _present(blocks[0][0])

    def outputs(self, parts: Mapping[str, nn.Module | Tensor], x: Tensor) -> Tensor:
        """The logits for a hidden state after the last block.

        Args:
            parts: modules with weights, and other weights, by their path in the model.
        """

        def fill(blocks: tuple[Frame, ...]) -> None:
            blocks[-1].given = x

        sizes = (x.shape[0], x.shape[1])
        _, output = self._run(self._outer, parts, x, self._dummy(x), sizes, fill)
        return tree_leaves(output)[self._logits]

    def _run(
        self,
        caller: Caller,
        parts: Mapping[str, nn.Module | Tensor],
        like: Tensor,
        tokens: Tensor,
        sizes: tuple[int, int],
        fill: Callable[[tuple[Frame, ...]], None],
    ) -> tuple[list[tuple[Tensor | None, Tensor | None]], Any]:
        """Runs the code with some parts.

        Returns:
            The hidden states that arrived at each block and that it gave, and the model's output.
        """

        def once() -> tuple[list[tuple[Tensor | None, Tensor | None]], Any]:
            blocks = self._prepare(parts, like, sizes)
            fill(blocks)
            output = self._call(caller, tokens, like.device)
            hidden = [(frame.arrived, frame.left) for frame in blocks]
            self._clear(like.device)
            return hidden, output

        if not self._answers or torch.compiler.is_compiling() or detect_fake_mode(like) is None:
            return once()
        with KnownAnswers(self._answers):
            return once()

    def _call(self, caller: Caller, tokens: Tensor, device: torch.device) -> Any:  # noqa: ANN401
        """What the model gives; None if it was not to run to its end."""
        if not self._stops:
            return caller.run(self._models[device], tokens)
        try:
            return caller.run(self._models[device], tokens)
        except EnoughError:
            return None

    def _prepare(
        self, parts: Mapping[str, nn.Module | Tensor], like: Tensor, sizes: tuple[int, int]
    ) -> tuple[Frame, ...]:
        """Puts parts, or zeros in their place, into the model on a device; the blocks' frames."""
        device = like.device
        if device not in self._models:
            self._models[device] = copy.deepcopy(self._models[torch.device("cpu")]).to(device)
        model = self._models[device]
        if device not in self._slots:
            self._slots[device] = (
                {path: cast("Slot", model.get_submodule(path)).frame for path in self._ends},
                tuple(cast("BlockSlot", model.get_submodule(path)).frame for path in self._blocks),
            )
        # A run that raised has left what it was given.
        self._clear(device)
        slots, blocks = self._slots[device]
        for path, frame in slots.items():
            frame.like, frame.sizes = like, sizes
            frame.call = cast("Callable[..., Any] | None", parts.get(path))
        for path, tensor in self._tensors.items():
            part = parts.get(path)
            _set(
                model,
                path,
                zeros_in_type_of(tensor.shape, like, tensor.dtype) if part is None else part,
            )
        return blocks

    def _dummy(self, x: Tensor, token_ranks: int = 1) -> Tensor:
        """What stands for the input of the model where its numbers do not count."""
        if self._examples is not None:
            return torch.zeros((), dtype=x.dtype, device=x.device).expand(
                x.shape[0], *self._examples
            )
        sizes = (x.shape[0], x.shape[1] * token_ranks)
        return torch.zeros(sizes, dtype=torch.int64, device=x.device)

    def _clear(self, device: torch.device) -> None:
        slots, blocks = self._slots[device]
        for frame in (*slots.values(), *blocks):
            frame.clear()
        for path in self._tensors:
            _set(self._models[device], path, None)


def _present(hidden: Tensor | None) -> Tensor:
    if hidden is None:
        raise ModelError("a block that ran when the model was taken apart did not run now")
    return hidden


def _floats(part: nn.Module | Tensor) -> Iterator[Tensor]:
    tensors = (part,) if isinstance(part, Tensor) else part.parameters()
    return (tensor for tensor in tensors if tensor.is_floating_point())


def _set(model: nn.Module, path: str, value: object) -> None:
    owner, _, leaf = path.rpartition(".")
    # A module's own `__setattr__` would make a parameter of it.
    object.__setattr__(model.get_submodule(owner), leaf, value)


class BlockInSkeleton(TensorShardable, nn.Module):
    """A block around which the code of its module runs."""

    plan_rules: Mapping[str, ShardingRule]
    """How its modules are sharded, if the model says so."""
    skeleton: tuple[Skeleton]
    """In a tuple, so that it is no part of the block."""
    index: int
    """Place of the block in whose slot it runs: the first of its kind."""
    token_ranks: int
    """Ranks that share the tokens of a sequence outside of attention and feed-forward."""

    def train(self, mode: bool = True) -> "BlockInSkeleton":
        """Puts the code around the block into the mode, too."""
        self.skeleton[0].train(mode)
        return super().train(mode)

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """How its modules are sharded."""
        return self.plan_rules

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.skeleton[0].hidden_after(super().forward, self.index, x, self.token_ranks)
