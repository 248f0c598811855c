"""The sandbox of chat templates: they reach nothing of Python's, and they end.

A template comes with a model from anywhere. Jinja's sandbox keeps it from attributes and from
changing what it is given, and lets it loop for ever.
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_TURNS = 1_000_000
"""Turns of loops, calls, and elements of products that one conversation may take."""
_CALL_TURNS = 20
"""Turns that a call counts for, which takes as long."""
_TURNS, _COUNTED = "_turns", "_counted"


class Turns:
    """Counts what a template does for one conversation."""

    def __init__(self) -> None:
        self._left = _MOST_TURNS

    def take(self, count: int) -> None:
        """Counts so many turns.

        Raises:
            TemplateError: they are too many.
        """
        self._left -= max(0, count)  # a template can call it
        if self._left < 0:
            raise TemplateError(f"it takes more than {_MOST_TURNS:,} turns for one conversation")

    def variables(self) -> dict[str, object]:
        """What a rendering must be given, so that it is counted here."""
        return {_TURNS: self}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose templates need the variables of `Turns` and end when those do."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  Jinja's own options
        super().__init__(**options)
        self.filters[_COUNTED] = _counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None)
        return tree

    def call(self, context: Context, called: object, /, *args: object, **more: object) -> object:
        """Calls a macro, a method or a function; a macro may call itself twice, for ever."""
        _turns_of(context).take(_CALL_TURNS)
        return super().call(context, called, *args, **more)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Multiplies: a text of ten letters becomes one of gigabytes."""
        _turns_of(context).take(_elements(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _turns_of(context: Context) -> Turns:
    turns = context.parent[_TURNS]
    if not isinstance(turns, Turns):
        raise TemplateError(f"`{_TURNS}` is no name of a template's own")
    return turns


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


def _elements(operator: str, left: object, right: object) -> int:
    """About how many elements, or words of a number, a product has."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * max(right, 1) // 64 if operator == "**" else (bits + right.bit_length()) // 64
    for items, times in ((left, right), (right, left)):
        if isinstance(items, Sized) and isinstance(times, int):
            return len(items) * max(times, 0)
    return 1
