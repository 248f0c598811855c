"""How a model is called, and what is known of the calls in one run of it."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from windlass.models.tracing.slots import OutputShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """How a model is called."""

    input_name: str | int = 0
    """The argument that takes its input."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Other arguments."""
    examples: tuple[int, ...] | None = None
    """Shape of one input that is no token."""
    per_layer: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Settings of the model that say something of each block."""
    targets: str | None = None
    """The argument that takes targets; None passes none."""
    by_token: bool = False
    """Whether one output must be `[b s v]`, the logits of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What of a module stands before its blocks, or after them."""

    modules: tuple[str, ...]
    """Paths of modules with weights."""
    tensors: tuple[str, ...] = ()
    """Paths of weights and buffers of no such module."""
    chain: bool = False
    """Whether each module takes what the one before it gives, and nothing else runs."""


@dataclass(slots=True)
class Called:
    """One call of a module in the run."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    log: tuple[object, ...] = ()
    operations: int = 0
    """Operations in the log when it returned."""
    version: int = 0
    """How often its output was written to when it returned."""

    @property
    def arguments(self) -> list[tuple[int | str, Any]]:
        """All arguments, by place or name."""
        return [*enumerate(self.args), *self.kwargs.items()]


def is_chain(calls: Sequence[Called], takes: Tensor, gives: Tensor) -> bool:
    """Whether each call takes what the one before it gives, alone."""
    for called in calls:
        is_plain = len(called.args) == 1 and called.args[0] is takes and not called.kwargs
        if not is_plain or not isinstance(called.output, Tensor):
            return False
        if called.output._version != called.version:  # noqa: SLF001  it was written to
            return False
        takes = called.output
    return takes is gives


def of_block(path: str) -> str:
    """The label of a block's hidden state."""
    return f"what block `{path}` gives"


def ancestors(blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The modules that the blocks are in, from the outermost one."""
    parts = next(iter(blocks)).split(".")
    return tuple(".".join(parts[:count]) for count in range(1, len(parts)))


def outer_modules(
    module: nn.Module, blocks: Mapping[str, nn.Module], ancestors: tuple[str, ...]
) -> Iterator[str]:
    """The outermost modules with weights that are no blocks and hold none."""
    found: list[str] = []
    for path, inner in module.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in (*blocks, *found))
        if not path or path in ancestors or path in blocks or is_inside:
            continue
        if any(True for _ in inner.parameters()):
            found.append(path)
            yield path


def holds_tensor(value: object) -> bool:
    """Whether there is a tensor in a structure."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def shapes_of(value: Any) -> Any:  # noqa: ANN401  whatever a module gives
    """A structure with shapes in place of its tensors."""
    if isinstance(value, Tensor):
        return OutputShape(tuple(value.shape), value.is_floating_point())
    if isinstance(value, tuple | list):
        return type(value)([shapes_of(each) for each in value])
    return value


def place_of(error: Exception) -> str:
    """The innermost line of code outside of torch and of this folder."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)
    ]
    if not frames:
        return "its code"
    return f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`,"
