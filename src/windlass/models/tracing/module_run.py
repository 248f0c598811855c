"""Runs a module once, and finds what its blocks take and what that is made of.

Weights and inputs are fake tensors in that run and all else has numbers, so that code may branch on
positions and sizes alone.
"""

import copy
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.init_weights import meta_copy
from windlass.models.inspection.shape_inference import fake_state
from windlass.models.tracing.labels import INPUT, Labels
from windlass.models.tracing.skeleton import (
    PROBE_BATCH,
    PROBE_SEQUENCE,
    BlockSlot,
    Caller,
    OutputShape,
    Skeleton,
    Slot,
)


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


@dataclass(slots=True)
class _Called:
    """One call of a module in the run."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    log: tuple[object, ...] = ()

    @property
    def arguments(self) -> list[tuple[int | str, Any]]:
        """All arguments, by place or name."""
        return [*enumerate(self.args), *self.kwargs.items()]


class ModuleRun:
    """What is found in one run of a module."""

    def __init__(
        self, module: nn.Module, name: str, blocks: Mapping[str, nn.Module], call: ModelCall
    ) -> None:
        self._module, self._name, self._blocks, self._call = module, name, blocks, call
        self._labels = Labels()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._ancestors = _ancestors(blocks)
        self._ends = tuple(_ends(module, blocks, self._ancestors))
        self._calls: list[_Called] = []
        self._outer_calls: dict[str, _Called] = {}
        self._places: list[int | str] = []
        self._state = self._fake_state()
        self._tokens = self._fake_input()
        self._output = self._run()
        self.logits = self._find_logits()
        self._require_once()
        self._require_owned()
        self.before, self.after = self._sides()
        self._check_blocks()

    @property
    def single_before(self) -> tuple[str, nn.Module] | None:
        """The only module before the blocks, if it maps the input to the hidden state alone."""
        hidden = self._hidden(self._block_calls()[0], self._places[0])
        return self._single(self.before, self._tokens, hidden)

    @property
    def single_after(self) -> tuple[str, nn.Module] | None:
        """The only module after the blocks, if it maps the hidden state to the logits alone."""
        output = self._block_calls()[-1].output
        hidden = output if isinstance(output, Tensor) else output[0]
        return self._single(self.after, hidden, tree_leaves(self._output)[self.logits])

    def _single(
        self, paths: tuple[str, ...], takes: Tensor, gives: Tensor
    ) -> tuple[str, nn.Module] | None:
        if len(paths) != 1:
            return None
        called = next(each for each in self._calls if each.path == paths[0])
        is_alone = len(called.args) == 1 and called.args[0] is takes and not called.kwargs
        if not is_alone or called.output is not gives:
            return None
        return paths[0], self._module.get_submodule(paths[0])

    def log(self, path: str) -> tuple[object, ...]:
        """The operations of a block and of the code after it."""
        return next(each.log for each in self._calls if each.path == path)

    def skeleton(self) -> Skeleton:
        """The module with slots in place of what has weights."""
        memo: dict[int, object] = {}
        stand_ins: dict[str, nn.Module] = {}
        for each, place in zip(self._block_calls(), self._places, strict=True):
            rest = None if isinstance(each.output, Tensor) else tuple(_shapes(each.output[1:]))
            stand_ins[each.path] = BlockSlot(meta_copy(self._blocks[each.path]), place, rest)
        outputs = {each.path: each.output for each in self._calls}
        for path in self._ends:
            shapes = _shapes(outputs[path]) if path in outputs else None
            stand_ins[path] = Slot(meta_copy(self._module.get_submodule(path)), shapes)
        for path, stand_in in stand_ins.items():
            memo[id(self._module.get_submodule(path))] = stand_in
        model = copy.deepcopy(self._module, memo)
        return Skeleton(
            model,
            self._inner_caller(),
            Caller("", self._call.input_name, (), dict(self._call.kwargs)),
            logits=self.logits,
            blocks=tuple(self._blocks),
            ends=self._ends,
            examples=self._call.examples,
        )

    def _error(self, text: str) -> ModelError:
        return ModelError(f"model `{self._name}` cannot be taken apart: {text}")

    def _fake_state(self) -> dict[str, Tensor]:
        """Fake parameters, and fake buffers of the blocks and ends; other buffers have numbers."""
        inside = tuple(f"{path}." for path in (*self._blocks, *self._ends))
        outside = {name for name, _ in self._module.named_buffers() if not name.startswith(inside)}
        with self._fakes:
            everything = fake_state(self._module)
        state = {name: fake for name, fake in everything.items() if name not in outside}
        self._names: dict[int, set[str]] = {}
        """All names of each weight, by its identity: those that are tied have several."""
        for name, fake in state.items():
            self._names.setdefault(id(fake), set()).add(name)
            self._labels.put(fake, f"`{min(self._names[id(fake)])}`")
        return state

    def _fake_input(self) -> Tensor:
        with self._fakes:
            shape = self._call.examples
            tokens = (
                torch.zeros((PROBE_BATCH, PROBE_SEQUENCE), dtype=torch.int64, device="cpu")
                if shape is None
                else torch.zeros((PROBE_BATCH, *shape), device="cpu")
            )
        self._labels.put(tokens, INPUT)
        return tokens

    def _run(self) -> Any:  # noqa: ANN401  as the module gives
        handles = []
        for path in ("", *self._ancestors, *self._blocks, *self._ends):
            module = self._module.get_submodule(path)
            handles += [
                module.register_forward_pre_hook(self._enter(path), with_kwargs=True),
                module.register_forward_hook(self._leave(path), with_kwargs=True),
            ]
        name = self._call.input_name
        args = (self._tokens,) if isinstance(name, int) else ()
        kwargs = dict(self._call.kwargs) | ({} if isinstance(name, int) else {name: self._tokens})
        try:
            with self._labels, torch.no_grad():
                return functional_call(self._module, self._state, args, kwargs)
        except ModelError:
            raise
        except Exception as error:
            raise self._error(
                f"{_place(error)} {' '.join(str(error).split())[:200] or type(error).__name__}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:  # noqa: ANN401  a hook of torch
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            called = _Called(path, args, kwargs)
            if path in self._ancestors or not path:
                self._outer_calls.setdefault(path, called)
                return
            if path in self._blocks:
                self._end_log()
                self._places.append(self._hidden_place(called))
                self._begin_log(called, module)
            self._calls.append(called)

        return hook

    def _leave(self, path: str) -> Any:  # noqa: ANN401  a hook of torch
        def hook(_: nn.Module, args: object, kwargs: object, output: Any) -> Any:  # noqa: ANN401
            del args, kwargs
            if path in self._ancestors or not path:
                return None
            called = next(each for each in reversed(self._calls) if each.path == path)
            if path not in self._blocks:
                called.output = output
                return None
            # From here on it is this block's hidden state, whatever it was made of.
            hidden = output if isinstance(output, Tensor) else output[0]
            own = hidden.clone()
            self._labels.put(own, _of_block(path))
            called.output = own if isinstance(output, Tensor) else (own, *output[1:])
            if path == [*self._blocks][-1]:
                self._end_log()
            return called.output

        return hook

    def _begin_log(self, called: _Called, block: nn.Module) -> None:
        names = {
            inner: self._state[f"{called.path}.{inner}"]
            for inner, _ in (*block.named_parameters(), *block.named_buffers())
        }
        self._labels.begin_log({**names, "hidden": self._hidden(called, self._places[-1])})

    def _end_log(self) -> None:
        blocks = self._block_calls()
        if blocks and not blocks[-1].log:
            blocks[-1].log = self._labels.end_log()

    def _hidden(self, called: _Called, place: int | str) -> Tensor:
        hidden: Tensor = called.args[place] if isinstance(place, int) else called.kwargs[place]
        return hidden

    def _hidden_place(self, called: _Called) -> int | str:
        """Where the hidden state stands among the arguments of a block.

        Raises:
            ModelError: no argument is one, or another one depends on more than positions.
        """
        blocks = self._block_calls()
        expected = frozenset({_of_block(blocks[-1].path)}) if blocks else None
        arguments = called.arguments
        made = {key: self._labels.of(value) for key, value in arguments}
        for key, value in arguments:
            is_hidden = (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and (made[key] == expected if expected else INPUT in made[key])
            )
            if is_hidden:
                others = {k: labels for k, labels in made.items() if k != key and labels}
                if others:
                    argument, labels = next(iter(others.items()))
                    raise self._error(
                        f"block `{called.path}` takes `{argument}` beside the hidden state, made "
                        f"of {' and '.join(sorted(labels)[:3])}; only what depends on positions "
                        "alone can be made again in each layer"
                    )
                return key
        mixed = next((labels for labels in made.values() if expected and expected < labels), None)
        raise self._error(
            f"block `{called.path}` takes a hidden state made of "
            f"{' and '.join(sorted(mixed)[:3])}, which layers after each other do not pass on"
            if mixed
            else f"block `{called.path}` does not take what the code before it made of the input"
        )

    def _block_calls(self) -> list[_Called]:
        return [each for each in self._calls if each.path in self._blocks]

    def _require_once(self) -> None:
        called = [each.path for each in self._block_calls()]
        if called != list(self._blocks):
            raise self._error(
                f"its blocks run in the order {', '.join(f'`{path}`' for path in called[:8])}, and "
                f"each must run once, from `{next(iter(self._blocks))}` on"
            )

    def _require_owned(self) -> None:
        for path in ("", *self._ancestors):
            for name, _ in self._module.get_submodule(path).named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                raise self._error(f"its weight `{full}` belongs to no module beside its blocks")

    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The modules with weights that run before the blocks, and those that run after them."""
        order = [each.path for each in self._calls]
        first, last = order.index(next(iter(self._blocks))), order.index([*self._blocks][-1])
        between = [path for path in order[first:last] if path not in self._blocks]
        if between:
            raise self._error(f"`{between[0]}` has weights and runs between the blocks")
        unused = [path for path in self._ends if path not in order]
        if unused:
            raise self._error(f"`{unused[0]}` has weights and is not used")
        before, after = dict.fromkeys(order[:first]), dict.fromkeys(order[last + 1 :])
        if before.keys() & after.keys():
            both = next(path for path in before if path in after)
            raise self._error(f"`{both}` has weights and runs before the blocks and after them")
        return tuple(before), tuple(after)

    def _check_blocks(self) -> None:
        """Refuses logits that depend on more than the last hidden state."""
        leaves = tree_leaves(self._output)
        made = self._labels.of(leaves[self.logits])
        last = _of_block([*self._blocks][-1])
        after = tuple(f"{path}." for path in self.after)
        own = {
            f"`{min(names)}`"
            for names in self._names.values()
            if any(name.startswith(after) for name in names)
        }
        wrong = sorted(made - own - {last})
        if wrong:
            raise self._error(
                f"its output is made of {wrong[0]} beside the hidden state after the last block"
            )

    def _find_logits(self) -> int:
        """Which leaf of the output are the logits: the first that depends on the last block."""
        last = _of_block([*self._blocks][-1])
        for index, leaf in enumerate(tree_leaves(self._output)):
            if isinstance(leaf, Tensor) and last in self._labels.of(leaf):
                return index
        raise self._error("its output does not depend on its blocks")

    def _inner_caller(self) -> Caller:
        """How the innermost module is called that takes the input as it is, and no other tensor."""
        for path in reversed(("", *self._ancestors)):
            called = self._outer_calls.get(path)
            if called is None:
                continue
            arguments = called.arguments
            tensors = [key for key, value in arguments if _holds_tensor(value)]
            if len(tensors) == 1 and dict(arguments)[tensors[0]] is self._tokens:
                key = tensors[0]
                args = tuple(None if index == key else v for index, v in enumerate(called.args))
                kwargs = {k: v for k, v in called.kwargs.items() if k != key}
                return Caller(path, key, args, kwargs)
        raise self._error("no part of it that holds the blocks takes the input as it is")


def _of_block(path: str) -> str:
    return f"what block `{path}` gives"


def _ancestors(blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The modules that the blocks are in, from the outermost one."""
    parts = next(iter(blocks)).split(".")
    return tuple(".".join(parts[:count]) for count in range(1, len(parts)))


def _ends(
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


def _holds_tensor(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _shapes(value: Any) -> Any:  # noqa: ANN401  whatever a module gives
    """A structure with shapes in place of its tensors."""
    if isinstance(value, Tensor):
        return OutputShape(tuple(value.shape), value.is_floating_point())
    if isinstance(value, tuple | list):
        return type(value)([_shapes(each) for each in value])
    return value


def _place(error: Exception) -> str:
    """The innermost line of code outside of torch and of this folder."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)
    ]
    if not frames:
        return "its code"
    return f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`,"
