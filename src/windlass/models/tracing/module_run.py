"""Runs a module once, and finds what its blocks take and what that is made of.

Weights and inputs are fake tensors in that run and all else has numbers, so that code may branch on
positions and sizes alone.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.init_weights import meta_copy
from windlass.models.inspection.shape_inference import fake_state
from windlass.models.tracing.labels import INPUT, Labels
from windlass.models.tracing.model_call import (
    Called,
    End,
    ModelCall,
    ancestors,
    holds_tensor,
    is_chain,
    of_block,
    outer_modules,
    place_of,
    shapes_of,
)
from windlass.models.tracing.skeleton import Caller, Skeleton
from windlass.models.tracing.slots import PROBE_BATCH, PROBE_SEQUENCE, BlockSlot, Slot

_TARGETS = "the targets"


class ModuleRun:
    """What is found in one run of a module."""

    def __init__(
        self, module: nn.Module, name: str, blocks: Mapping[str, nn.Module], call: ModelCall
    ) -> None:
        self._module, self._name, self._blocks, self._call = module, name, blocks, call
        self._labels = Labels()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._ancestors = ancestors(blocks)
        self._ends = tuple(outer_modules(module, blocks, self._ancestors))
        self._calls: list[Called] = []
        self._outer_calls: dict[str, Called] = {}
        self._places: list[int | str] = []
        self._tensors: dict[str, Tensor] = {}
        """Weights of no block or end, and buffers of none whose numbers are not known."""
        self._state = self._fake_state()
        self._tokens, self._targets = self._fake_inputs()
        self._output = self._run()
        self.logits = self._find_logits()
        self._require_once()
        self._stops = call.targets is not None
        self.before, self.after = self._find_ends()

    def is_alone(self, path: str) -> bool:
        """Whether a block takes the hidden state alone, and no code runs between it and the next.

        Such a block is a layer as it is.
        """
        calls = self._block_calls()
        index = [each.path for each in calls].index(path)
        called = calls[index]
        if len(called.args) != 1 or called.kwargs or not isinstance(called.output, Tensor):
            return False
        if index + 1 == len(calls):
            return True
        is_next = self._hidden(calls[index + 1], self._places[index + 1]) is called.output
        return is_next and len(called.log) == called.operations

    def log(self, path: str) -> tuple[object, ...]:
        """The operations of a block and of the code after it."""
        return next(each.log for each in self._calls if each.path == path)

    def skeleton(self) -> Skeleton:
        """The module with slots in place of what has weights."""
        memo: dict[int, object] = {}
        stand_ins: dict[str, nn.Module] = {}
        for each, place in zip(self._block_calls(), self._places, strict=True):
            rest = None if isinstance(each.output, Tensor) else tuple(shapes_of(each.output[1:]))
            stand_ins[each.path] = BlockSlot(meta_copy(self._blocks[each.path]), place, rest)
        outputs = {each.path: each.output for each in self._calls}
        for path in self._ends:
            shapes = shapes_of(outputs[path]) if path in outputs else None
            stand_ins[path] = Slot(meta_copy(self._module.get_submodule(path)), shapes)
        for path, stand_in in stand_ins.items():
            memo[id(self._module.get_submodule(path))] = stand_in
        memo |= {id(tensor): None for tensor in self._tensors.values()}
        model = copy.deepcopy(self._module, memo)
        for path in self._tensors:
            owner, _, leaf = path.rpartition(".")
            # What is given to a run in its place is no parameter.
            delattr(model.get_submodule(owner), leaf)
        return Skeleton(
            model,
            self._inner_caller(),
            self._outer_caller(),
            logits=self.logits,
            blocks=tuple(self._blocks),
            ends=self._ends,
            tensors={path: tensor.detach().to("meta") for path, tensor in self._tensors.items()},
            stops=self._stops,
            answers=self._labels.answers,
            examples=self._call.examples,
        )

    def _error(self, text: str) -> ModelError:
        return ModelError(f"model `{self._name}` cannot be taken apart: {text}")

    def _fake_state(self) -> dict[str, Tensor]:
        """Fake parameters, and fake buffers of the blocks and ends; other buffers have numbers.

        Those on the meta device are fake, too.
        """
        inside = tuple(f"{path}." for path in (*self._blocks, *self._ends))
        outside = {
            name
            for name, buffer in self._module.named_buffers(remove_duplicate=False)
            if not name.startswith(inside) and not buffer.is_meta
        }
        parameters = self._module.named_parameters(remove_duplicate=False)
        self._tensors = {
            name: tensor
            for name, tensor in (*parameters, *self._module.named_buffers(remove_duplicate=False))
            if not name.startswith(inside) and name not in outside
        }
        with self._fakes:
            everything = fake_state(self._module)
        state = {name: fake for name, fake in everything.items() if name not in outside}
        self._names: dict[int, set[str]] = {}
        """All names of each weight, by its identity: those that are tied have several."""
        for name, fake in state.items():
            self._names.setdefault(id(fake), set()).add(name)
            self._labels.put(fake, f"`{min(self._names[id(fake)])}`")
        return state

    def _fake_inputs(self) -> tuple[Tensor, Tensor]:
        with self._fakes:
            shape, sizes = self._call.examples, (PROBE_BATCH, PROBE_SEQUENCE)
            targets = torch.zeros(sizes, dtype=torch.int64, device="cpu")
            tokens = (
                torch.zeros(sizes, dtype=torch.int64, device="cpu")
                if shape is None
                else torch.zeros((PROBE_BATCH, *shape), device="cpu")
            )
        self._labels.put(tokens, INPUT)
        self._labels.put(targets, _TARGETS)
        return tokens, targets

    def _run(self) -> Any:  # noqa: ANN401  as the module gives
        handles = []
        for path in ("", *self._ancestors, *self._blocks, *self._ends):
            module = self._module.get_submodule(path)
            handles += [
                module.register_forward_pre_hook(self._enter(path), with_kwargs=True),
                module.register_forward_hook(self._leave(path), with_kwargs=True),
            ]
        name, targets = self._call.input_name, self._call.targets
        args = (self._tokens,) if isinstance(name, int) else ()
        kwargs = dict(self._call.kwargs) | ({} if isinstance(name, int) else {name: self._tokens})
        kwargs |= {} if targets is None else {targets: self._targets}
        try:
            with self._labels, torch.no_grad():
                return functional_call(self._module, self._state, args, kwargs)
        except ModelError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._error(
                f"{place_of(error)} depends on the numbers in tokens or weights, and what is "
                "computed may depend on shapes alone; use tensor operations such as `torch.where`"
            ) from error
        except Exception as error:
            raise self._error(
                f"{place_of(error)} {' '.join(str(error).split())[:200] or type(error).__name__}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:  # noqa: ANN401  a hook of torch
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            called = Called(path, args, kwargs)
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
                called.version = getattr(output, "_version", 0)
                return None
            # From here on it is this block's hidden state, whatever it was made of.
            hidden = output if isinstance(output, Tensor) else output[0]
            own = hidden.clone()
            self._labels.put(own, of_block(path))
            called.output = own if isinstance(output, Tensor) else (own, *output[1:])
            called.operations = len(self._labels.end_log())
            if path == [*self._blocks][-1]:
                self._end_log()
            return called.output

        return hook

    def _begin_log(self, called: Called, block: nn.Module) -> None:
        names = {
            inner: self._state[f"{called.path}.{inner}"]
            for inner, _ in (*block.named_parameters(), *block.named_buffers())
        }
        self._labels.begin_log({**names, "hidden": self._hidden(called, self._places[-1])})

    def _end_log(self) -> None:
        blocks = self._block_calls()
        if blocks and not blocks[-1].log:
            blocks[-1].log = self._labels.end_log()

    def _hidden(self, called: Called, place: int | str) -> Tensor:
        hidden: Tensor = called.args[place] if isinstance(place, int) else called.kwargs[place]
        return hidden

    def _hidden_place(self, called: Called) -> int | str:
        """Where the hidden state stands among the arguments of a block."""
        blocks = self._block_calls()
        expected = frozenset({of_block(blocks[-1].path)}) if blocks else None
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

    def _block_calls(self) -> list[Called]:
        return [each for each in self._calls if each.path in self._blocks]

    def _require_once(self) -> None:
        called = [each.path for each in self._block_calls()]
        if called != list(self._blocks):
            raise self._error(
                f"its blocks run in the order {', '.join(f'`{path}`' for path in called[:8])}, and "
                f"each must run once, from `{next(iter(self._blocks))}` on"
            )

    def _find_ends(self) -> tuple[End, End]:
        """What stands before the blocks, and what after them."""
        order = [each.path for each in self._calls]
        first, last = order.index(next(iter(self._blocks))), order.index([*self._blocks][-1])
        between = [path for path in order[first:last] if path not in self._blocks]
        if between:
            raise self._error(f"`{between[0]}` has weights and runs between the blocks")
        calls, logits = self._block_calls(), tree_leaves(self._output)[self.logits]
        left = calls[-1].output
        left = left if isinstance(left, Tensor) else left[0]
        hidden = self._hidden(calls[0], self._places[0])
        before, _ = self._end(self._calls[:first], self._tokens, hidden, INPUT)
        after, is_read = self._end(
            self._calls[last + 1 :], left, logits, of_block([*self._blocks][-1])
        )
        self._stops |= is_read
        unused = [path for path in self._ends if path not in (*before.modules, *after.modules)]
        if unused:
            raise self._error(f"`{unused[0]}` has weights and is not used")
        stored = self._module.state_dict(keep_vars=True)
        rest = tuple(
            name
            for name in (*self._tensors, *(stored.keys() - self._state.keys()))
            if name not in (*before.tensors, *after.tensors)
        )
        if rest:
            before = replace(before, tensors=(*before.tensors, *rest), chain=False)
        return before, after

    def _end(
        self, calls: Sequence[Called], takes: Tensor, gives: Tensor, source: str
    ) -> tuple[End, bool]:
        """What makes `gives` of `takes`, and whether weights are read without a call.

        Args:
            source: what `takes` is made of.
        """
        made = self._labels.of(gives)
        if _TARGETS in made:
            raise self._error("its logits depend on targets")
        modules = dict.fromkeys(called.path for called in calls)
        read = made - self._labels_in(modules) - {source}
        more = [
            path for path in self._ends if path not in modules and self._labels_in([path]) & read
        ]
        tensors = [path for path in self._tensors if self._labels.of(self._state[path]) & read]
        wrong = read - self._labels_in(more) - self._labels.of([self._state[t] for t in tensors])
        if wrong:
            raise self._error(
                f"its output is made of {min(wrong)} beside the hidden state after the last block"
                if source != INPUT
                else f"the hidden state before the blocks is made of {min(wrong)}"
            )
        end = End(modules=(*modules, *more), tensors=tuple(tensors))
        return replace(end, chain=not read and is_chain(calls, takes, gives)), bool(read)

    def _labels_in(self, paths: Iterable[str]) -> frozenset[str]:
        """The labels of all weights in some modules."""
        inside = tuple(f"{path}." for path in paths)
        return self._labels.of([t for name, t in self._state.items() if name.startswith(inside)])

    def _find_logits(self) -> int:
        """Which leaf of the output are the logits: the first that depends on the last block."""
        last = of_block([*self._blocks][-1])
        leaves = tree_leaves(self._output)
        found = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and last in self._labels.of(leaf)
        ]
        if self._call.by_token:
            sizes = (PROBE_BATCH, PROBE_SEQUENCE)
            logits = [i for i in found if leaves[i].ndim == 3 and leaves[i].shape[:2] == sizes]
            if len(logits) != 1:
                shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves if holds_tensor(leaf))
                raise self._error(
                    f"for tokens {list(sizes)} it gives {shapes or 'no tensor'}, and one output "
                    f"must be logits [{PROBE_BATCH}, {PROBE_SEQUENCE}, vocabulary]"
                )
            return logits[0]
        if not found:
            raise self._error("its output does not depend on its blocks")
        return found[0]

    def _outer_caller(self) -> Caller:
        """How the model itself is called."""
        call = self._call
        return Caller(
            "",
            call.input_name,
            (None,) * isinstance(call.input_name, int),
            dict(call.kwargs),
            call.targets,
        )

    def _inner_caller(self) -> Caller:
        """How the innermost module is called that takes the input as it is, and no other tensor."""
        for path in reversed(("", *self._ancestors)):
            called = self._outer_calls.get(path)
            if called is None:
                continue
            arguments = called.arguments
            tensors = [key for key, value in arguments if holds_tensor(value)]
            if len(tensors) == 1 and dict(arguments)[tensors[0]] is self._tokens:
                key = tensors[0]
                args = tuple(None if index == key else v for index, v in enumerate(called.args))
                kwargs = {k: v for k, v in called.kwargs.items() if k != key}
                return Caller(path, key, args, kwargs)
        if self._call.targets is not None:
            return self._outer_caller()
        raise self._error("no part of it that holds the blocks takes the input as it is")
