"""Cuts a module into layers: what comes before its blocks, the blocks, and what comes after.

The parts share the parameters of the module. Values that depend on shapes alone, such as masks, are
made again in each part that takes them; any other value beside the hidden state stands in the way.
"""

import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.tracing.block_list import find_blocks
from windlass.models.tracing.prove_layers import module_mode, prove_layers
from windlass.models.tracing.tracer import TRACED_TOKENS, ModuleTracer

_TARGETS = ("targets", "target", "labels", "label")
"""Names by which the forward pass of a model takes targets."""
_BEFORE, _AFTER = "embeddings", "head"
"""Names of the layers around the blocks, if they are no single module."""


def cut_module(module: nn.Module, name: str) -> tuple[tuple[str, nn.Module], ...]:
    """A module's layers: from tokens to the first block, the blocks, from the last to the logits.

    If the module has real weights, the layers are proved equal to it: logits and gradients.

    Args:
        module: a module with a list of blocks, on any device; it is not changed.
        name: its name in messages.

    Returns:
        The layers with their names. They share the module's parameters.

    Raises:
        ModelError: what stands in the way.
    """
    blocks = find_blocks(module, name)
    errors: list[ModelError] = []
    with module_mode(module, training=True):
        for targets in _targets(module, name):
            try:
                tracer = ModuleTracer(blocks, targets)
                trace = _Trace(module, name, tracer.run(module, name), tracer, blocks)
                layers = trace.layers()
            except ModelError as error:
                errors.append(error)
            else:
                prove_layers(module, name, layers, targets=targets, logits=trace.logits_index)
                return layers
    raise errors[0]


def _targets(module: nn.Module, name: str) -> list[str | None]:
    """What to pass as targets: first by the name that the forward pass has for them, then nothing.

    Many models give all logits only beside a loss, others only without one.

    Raises:
        ModelError: the forward pass takes no tokens, or needs more.
    """
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [p.name for p in parameters[1:] if p.kind in keywords]
    found = next((target for target in _TARGETS if target in names), None)
    needed = [
        p.name
        for p in parameters[1:]
        if p.default is p.empty and p.kind in keywords and p.name != found
    ]
    if needed or not parameters:
        raise ModelError(
            f"the forward pass of model `{name}` needs {', '.join(f'`{n}`' for n in needed)} "
            "beside tokens; give it a default"
            if needed
            else f"the forward pass of model `{name}` takes no tokens"
        )
    if found is None:
        return [None]
    is_needed = any(p.name == found and p.default is p.empty for p in parameters)
    return [found] if is_needed else [found, None]


class _Trace:
    """The graph of a module's forward pass, and where it is cut."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        graph: fx.Graph,
        tracer: ModuleTracer,
        blocks: dict[str, nn.Module],
    ) -> None:
        self._module, self._name, self._tracer, self._blocks = module, name, tracer, blocks
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._tokens = next(iter(graph.nodes))
        self._calls = self._block_calls()
        self._from_tokens: set[fx.Node] = set()
        """Nodes that depend on the numbers in the tokens, or in targets."""
        for node in graph.nodes:
            comes_in = node.op == "placeholder" or any(
                each in self._from_tokens for each in node.all_input_nodes
            )
            if comes_in and node.op != "output" and tracer.depends_on_data(node):
                self._from_tokens.add(node)
        self._from_targets: set[fx.Node] = set()
        for node in graph.nodes:
            is_other = node.op == "placeholder" and node is not self._tokens
            if is_other or any(each in self._from_targets for each in node.all_input_nodes):
                self._from_targets.add(node)
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._graphs: dict[str, tuple[fx.GraphModule]] = {}
        """Graphs of blocks by their code: layers of one kind share one."""
        self.logits_index, self._logits = self._find_logits(graph)

    def layers(self) -> tuple[tuple[str, nn.Module], ...]:
        """The layers with their names."""
        hidden = [self._hidden_state(call) for call in self._calls]
        hidden.append(self._output_state(self._calls[-1]))
        ends = [*self._calls[1:], hidden[-1]]
        """Code up to the next block belongs to a block."""
        parts = [self._end(_Span(self._tokens, hidden[0], self._tokens, self._calls[0]), _BEFORE)]
        for index, call in enumerate(self._calls):
            span = _Span(hidden[index], hidden[index + 1], call, ends[index])
            parts.append(self._block(call, span))
        if hidden[-1] is not self._logits:
            parts.append(
                self._end(_Span(hidden[-1], self._logits, self._calls[-1], self._logits), _AFTER)
            )
        return tuple(parts)

    def _error(self, text: str) -> ModelError:
        return ModelError(f"model `{self._name}` cannot be taken apart: {text}")

    def _block_calls(self) -> list[fx.Node]:
        """The calls of the blocks, once each and in order."""
        calls = [n for n in self._order if n.op == "call_module" and n.target in self._blocks]
        called = [str(call.target) for call in calls]
        if called != list(self._blocks):
            raise self._error(
                f"its blocks run in the order {', '.join(f'`{path}`' for path in called[:8])}, and "
                f"each must run once, from `{next(iter(self._blocks))}` on"
            )
        return calls

    def _find_logits(self, graph: fx.Graph) -> tuple[int, fx.Node]:
        """The output `[b s v]`, and which of the leaves of the output it is."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        leaves = tree_leaves(output.args[0], is_leaf=lambda leaf: isinstance(leaf, fx.Node))
        found = [
            (index, leaf)
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, fx.Node) and _is_hidden(self._tracer.value(leaf))
        ]
        if len(found) != 1:
            shapes = [
                str(list(getattr(self._tracer.value(leaf), "shape", ())))
                for leaf in leaves
                if isinstance(leaf, fx.Node)
            ]
            raise self._error(
                f"for tokens {list(TRACED_TOKENS)} it gives {', '.join(shapes) or 'no tensor'}, "
                f"and one output must be logits {[*TRACED_TOKENS, 'vocabulary']}".replace("'", "")
            )
        return found[0]

    def _hidden_state(self, call: fx.Node) -> fx.Node:
        """What a block takes and the layer before it gives."""
        states = [each for each in call.all_input_nodes if each in self._from_tokens]
        if not states:
            raise self._error(f"block `{call.target}` does not depend on the tokens")
        state = call.args[0] if call.args and call.args[0] in states else states[0]
        if not isinstance(state, fx.Node) or not _is_hidden(self._tracer.value(state)):
            shape = list(getattr(self._tracer.value(states[0]), "shape", ()))
            raise self._error(
                f"for tokens {list(TRACED_TOKENS)} block `{call.target}` takes {shape}, and must "
                f"take {[*TRACED_TOKENS, 'width']}, batch first".replace("'", "")
            )
        return state

    def _output_state(self, call: fx.Node) -> fx.Node:
        """What a block gives: its output, or the only item of it that is used."""
        if isinstance(self._tracer.value(call), Tensor):
            return call
        items = [user for user in call.users if user.target is operator.getitem]
        if len(items) != 1 or not _is_hidden(self._tracer.value(items[0])):
            raise self._error(f"block `{call.target}` gives several values that are used")
        return items[0]

    def _end(self, span: "_Span", name: str) -> tuple[str, nn.Module]:
        """The layer before or after the blocks: a single module, or a graph of several."""
        result = span.result
        is_module = result.op == "call_module" and result.args == (span.source,)
        if is_module and not result.kwargs and not self._guards(span):
            return str(result.target), self._module.get_submodule(str(result.target))
        graph = self._part(span, block=None)
        return name, fx.GraphModule(self._module, graph, class_name=name.capitalize())

    def _block(self, call: fx.Node, span: "_Span") -> tuple[str, nn.Module]:
        """The layer of a block: itself, or itself with what its call needs beside the input."""
        path = str(call.target)
        block = self._blocks[path]
        is_plain = call is span.result and call.args == (span.source,) and not call.kwargs
        if is_plain and not self._guards(span):
            return path, block
        return path, self._in_graph(block, self._part(span, block=call))

    def _guards(self, span: "_Span") -> list[fx.Node]:
        """The guards of a part's code, without those of the loss."""
        start, stop = self._order[span.start], self._order[span.stop]
        guards = self._tracer.guards - self._from_targets
        return [guard for guard in guards if start < self._order[guard] < stop]

    def _in_graph(self, block: nn.Module, graph: fx.Graph) -> nn.Module:
        """A block of the same parameters whose forward pass runs in a graph."""
        own = type(block)
        if own not in self._classes:
            self._classes[own] = type(own.__name__, (_BlockInGraph, own), {})
        code = graph.python_code("self").src
        shared = self._graphs.setdefault(code, (fx.GraphModule({}, graph),))
        twin = nn.Module.__new__(self._classes[own])
        vars(twin).update(vars(block), in_graph=shared)
        return twin

    def _part(self, span: "_Span", *, block: fx.Node | None) -> fx.Graph:
        """The graph from one hidden state to the next."""
        source = span.source
        needed = self._needed(source, [span.result, *self._guards(span)])
        self._check(needed, source, block)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        run = None if block is None else graph.placeholder("block")
        copies[source] = graph.placeholder("x")
        if self._tokens in needed:
            # Only the sizes of the tokens are asked for: the features of `[b s d]` have the same.
            first: Any = (copies[source], (..., 0))  # torch's type of arguments has no ellipsis
            column = graph.call_function(operator.getitem, first)
            copies[self._tokens] = graph.call_method("long", (column,))
        for node in sorted(needed - {self._tokens}, key=self._order.__getitem__):
            arguments = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            if node is block:
                copies[node] = graph.call_function(call_block, (run, *arguments[0]), arguments[1])
            else:
                copies[node] = graph.create_node(node.op, node.target, *arguments)
        graph.output(copies[span.result])
        return graph

    def _needed(self, source: fx.Node, results: Iterable[fx.Node]) -> set[fx.Node]:
        """All nodes between a source and some results."""
        needed: set[fx.Node] = set()
        stack = list(results)
        while stack:
            node = stack.pop()
            if node is not source and node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        return needed

    def _check(self, needed: set[fx.Node], source: fx.Node, block: fx.Node | None) -> None:
        """Refuses values that a part takes beside the hidden state and cannot make."""
        if needed & self._from_targets:
            raise self._error("its logits depend on targets")
        where = "the part after the blocks" if block is None else f"block `{block.target}`"
        ours = {source}
        for node in sorted(needed, key=self._order.__getitem__):
            if any(each in ours for each in node.all_input_nodes):
                ours.add(node)
        data = needed & self._from_tokens
        foreign = data - ours - {self._tokens}
        reads_tokens = any(self._tokens in node.all_input_nodes for node in data)
        if source is not self._tokens and (foreign or reads_tokens):
            value = max(foreign, key=self._order.__getitem__, default=self._tokens).name
            raise self._error(
                f"{where} takes `{value}` of earlier code beside its input, and only values that "
                "depend on shapes alone can be made again"
            )
        made = [
            node.name
            for node in needed
            if node.op in ("call_module", "get_attr") and node is not block
        ]
        if block is not None and made:
            raise self._error(
                f"{where} takes `{made[0]}`, made of weights or buffers outside of the block; "
                "make it in the block"
            )


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of a trace that a layer runs."""

    source: fx.Node
    """What it takes."""
    result: fx.Node
    """What it gives."""
    start: fx.Node
    """Its code begins after this node, and ends before `stop`."""
    stop: fx.Node


def _is_hidden(value: object) -> bool:
    """Whether a value is a hidden state `[b s d]`, or logits."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.ndim == 3
        and value.shape[:2] == TRACED_TOKENS
    )


class _BlockInGraph(nn.Module):
    """A block whose forward pass runs in a graph, which makes its other arguments."""

    in_graph: tuple[fx.GraphModule]
    """In a tuple, so that it is no child."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        output: Tensor = self.in_graph[0](super().forward, x)
        return output


def call_block(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """What a block gives."""
    return block(*args, **kwargs)
