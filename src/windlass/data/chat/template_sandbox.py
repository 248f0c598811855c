"""The sandbox of chat templates: they reach nothing of Python's, they end, and they stay small.

A template comes with a model from anywhere. Jinja's sandbox keeps it from attributes and from
changing what it is given, and lets it loop for ever and double a text until memory ends.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MOST_TURNS = 1_000_000
"""Turns of loops, calls, and elements of products that one conversation may take."""
_CALL_TURNS = 20
"""Turns that a call counts for, which takes as long."""
_TURN_ELEMENTS = 64
"""Elements of lists whose sizes are added up in the time of a turn."""
_MOST_CHARACTERS = 2**26
"""Characters that one conversation may make, in texts that are alive or not: 256 MiB at most."""
_TOO_MUCH = f"it makes more than {_MOST_CHARACTERS:,} characters for one conversation"
_ELEMENT_CHARACTERS, _VALUE_CHARACTERS = 8, 64
"""Characters that an element of a list counts for, and a value of those in a list that becomes a
text: about their memory."""
_LEFT_OUT = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages and debugging; how much they make is hard to tell before."""
_PADDING = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "tojson",
     "zfill"}
)  # fmt: skip
"""Filters and methods that fill up with as much as they are told."""
_FORMATS = frozenset({"format", "format_map"})
_SHALLOW = frozenset(
    {"abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int",
     "items", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr",
     "reverse", "round", "select", "selectattr", "sort", "unique"}
)  # fmt: skip
"""Filters that make no text of what lists hold, and no more than they are given."""
_SIZED = (str, bytes, list, tuple)
_TURNS, _COUNTED, _JOINED, _MADE = "_turns", "_counted", "_joined", "_made"


class Turns:
    """Counts what a template does for one conversation."""

    def __init__(self) -> None:
        self._left, self._room = _MOST_TURNS, _MOST_CHARACTERS

    def take(self, count: int) -> None:
        """Counts so many turns.

        Raises:
            TemplateError: they are too many.
        """
        self._left -= max(0, count)  # a template can call it
        if self._left < 0:
            raise TemplateError(f"it takes more than {_MOST_TURNS:,} turns for one conversation")

    def require_room(self, size: int) -> None:
        """Refuses what would make so many characters.

        Raises:
            TemplateError: they are too many.
        """
        if size > self._room:
            raise TemplateError(_TOO_MUCH)

    def made(self, result: object) -> object:
        """Counts what an operation has made, and returns it."""
        if isinstance(result, (str, bytes)):
            size = len(result)
        else:
            size = _ELEMENT_CHARACTERS * (len(result) if isinstance(result, (list, tuple)) else 1)
        self.require_room(size)
        self._room -= size
        return result

    def measure(self, *values: object) -> tuple[int, int]:
        """Characters of values with all that is in them, and the depth of lists.

        A list may hold another many times over, which holds a third one so: it is counted until
        there is no room.
        """
        size = deepest = seen = 0
        waiting: list[tuple[object, int]] = [(value, 1) for value in values]
        while waiting and size <= self._room:
            value, depth = waiting.pop()
            deepest, seen = max(deepest, depth), seen + 1
            size += _VALUE_CHARACTERS + (len(value) if isinstance(value, (str, bytes)) else 0)
            if isinstance(value, Mapping):
                waiting += ((item, depth + 1) for pair in value.items() for item in pair)
            elif isinstance(value, (list, tuple)):
                waiting += ((item, depth + 1) for item in value)
        self.take(seen // _TURN_ELEMENTS)
        return size, deepest

    def text(self, *values: object) -> str:
        """The text of values, one after the other."""
        self.require_room(self.measure(*values)[0])
        text = "".join(map(str, values))
        self.made(text)
        return text

    def variables(self) -> dict[str, object]:
        """What a rendering must be given, so that it is counted here."""
        return {_TURNS: self}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose templates need the variables of `Turns` and end when those do.

    Args:
        filters: filters by name beside Jinja's own, or in their place.
        options: Jinja's own.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., object]], **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options, finalize=_shown)
        del self.globals["lipsum"]
        named = {name: run for name, run in self.filters.items() if name not in _LEFT_OUT}
        self.filters = {
            **{name: _bounded(name, run) for name, run in (named | dict(filters)).items()},
            _COUNTED: _counted,
            _JOINED: pass_context(lambda context, parts: _turns_of(context).text(*parts)),
            _MADE: pass_context(lambda context, value: _turns_of(context).made(value)),
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a template, a macro or a block has made, piece by piece."""
        pieces = list(parts)
        if sum(map(len, pieces)) > _MOST_CHARACTERS:
            raise TemplateError(_TOO_MUCH)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _CountingNodes().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(self, context: Context, called: Any, /, *args: object, **more: object) -> object:  # noqa: ANN401
        """Calls a macro, a method or a function; a macro may call itself twice, for ever."""
        turns = _turns_of(context)
        turns.take(_CALL_TURNS)
        # Jinja wraps methods that format.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            name = called.__name__
            args = _settled(turns, name, args)
            turns.require_room(_bound(turns, name, (owner, *args), tuple(more.values())))
        return turns.made(super().call(context, called, *args, **more))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Adds, multiplies or formats: a text of ten letters becomes one of gigabytes."""
        turns = _turns_of(context)
        if operator[0] == "*":
            turns.take(_elements(operator, left, right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            turns.require_room(_bound(turns, "format", (left, right), ()))
        elif isinstance(left, _SIZED) and isinstance(right, _SIZED):
            turns.require_room(len(left) + len(right))  # of lists, `made` counts more
        return turns.made(super().call_binop(context, operator, left, right))


class _CountingNodes(NodeTransformer):
    """Puts filters that count around what a template loops over, joins and cuts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  Jinja's own form
        self.generic_visit(node)
        node.iter = _filter(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filter(node.filter, _MADE)
        return node


def _filter(node: nodes.Node | None, name: str) -> nodes.Filter:
    """A filter of a value, or of the content of a block, which is no node."""
    line = None if node is None else node.lineno
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _turns_of(context: Context) -> Turns:
    turns = context.parent[_TURNS]
    if not isinstance(turns, Turns):
        raise TemplateError(f"`{_TURNS}` is no name of a template's own")
    return turns


@pass_context
def _shown(context: Context, value: object) -> str:
    """The text of what a template shows."""
    return value if isinstance(value, str) else _turns_of(context).text(value)


@pass_context
def _counted(context: Context, items: Iterable[object]) -> Iterable[object]:
    """What a loop goes through, whose turns count."""
    turns = _turns_of(context)
    if isinstance(items, Sized):
        turns.take(len(items))
        return items
    return _each(items, turns)


def _each(items: Iterable[object], turns: Turns) -> Iterator[object]:
    for item in items:
        turns.take(1)
        yield item


def _bounded(name: str, run: Callable[..., object]) -> Callable[..., object]:
    """A filter that is refused before it makes more than there is room for."""
    passed = getattr(run, "jinja_pass_arg", None)

    @pass_context
    def bounded(context: Context, *args: object, **more: object) -> object:
        turns = _turns_of(context)
        args = _settled(turns, name, args)
        turns.require_room(_bound(turns, name, args, tuple(more.values())))
        if passed is None:
            return turns.made(run(*args, **more))
        places = {"eval_context": context.eval_ctx, "environment": context.environment}
        return turns.made(run(places.get(passed.name, context), *args, **more))

    return bounded


def _settled(turns: Turns, name: str, args: tuple[object, ...]) -> tuple[object, ...]:
    """Arguments of which those that `join` would go through are lists, whose sizes can be told."""
    if name != "join":
        return args
    return tuple(list(_each(arg, turns)) if isinstance(arg, Iterator) else arg for arg in args)


def _bound(turns: Turns, name: str, args: tuple[object, ...], more: tuple[object, ...]) -> int:
    """No fewer characters than a filter, a method or an operator makes.

    Args:
        turns: counts the work.
        name: what is called; methods and filters have the same names.
        args: what it takes, a method's own text first.
        more: what it takes by keyword.
    """
    if name in _SHALLOW or (len(args) == 1 and not more and isinstance(args[0], str)):
        return 0  # a text alone grows a few times at most, and `made` counts it
    if name == "replace" and len(args) > 2 and all(isinstance(arg, str) for arg in args[:3]):
        text, old, new = map(str, args[:3])
        return len(text) + text.count(old) * len(new)
    size, depth = turns.measure(*args, *more)
    given = (*args[1:], *more)
    numbers = sum(each for each in given if type(each) is int and each > 0)
    if name == "join":
        return size * (1 + _longest(*args, *more))
    if name in ("replace", "translate"):
        return size * size
    if name in _FORMATS:
        text = str(args[0])
        widths = sum(map(int, re.findall(r"\d{1,18}", text)))
        return size * (1 + widths + (numbers if re.search(r"\*|\{[^}]*\{", text) else 0))
    if name in _PADDING:
        return size * (1 + max(numbers, _longest(*given)) * depth)
    return size


def _longest(*values: object) -> int:
    return max((len(value) for value in values if isinstance(value, (str, bytes))), default=0)


def _elements(operator: str, left: object, right: object) -> int:
    """About how many elements, or words of a number, a product has."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * max(right, 1) // 64 if operator == "**" else (bits + right.bit_length()) // 64
    for items, times in ((left, right), (right, left)):
        if isinstance(items, Sized) and isinstance(times, int):
            return len(items) * max(times, 0)
    return 1
