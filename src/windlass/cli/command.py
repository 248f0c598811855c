"""Makes commands of functions: the options are their arguments, and the output is their answer."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from windlass import api
from windlass.cli.console import ProgressBars, console, print_answer, print_notes, print_written

_GIVEN = {"progress", "ask"}
"""Arguments that the command line gives itself, and no word of it."""
AsJson = Annotated[api.AsJson, Parameter(help="Print the result as JSON.")]


def __getattr__(place: str) -> Callable[..., None]:
    """The command of the function at a place, such as `api.layer_dataflow.dataflow`."""
    module, _, name = place.rpartition(".")
    if not module:
        raise AttributeError(name)
    return as_command(getattr(import_module(f"windlass.{module}"), name))


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """A function that shows its progress, prints its answer, and exits with the answer's code.

    Args:
        function: takes what a command line gives, and returns an `Answer`, or another value as
            `Annotated[Value, ShownValue]`; an argument `progress` is given bars, `ask` asks on a
            terminal, and each argument of type `Written` is a file that it writes.
    """
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    given_here = _GIVEN & hints.keys()
    written = [name for name, hint in hints.items() if hint == api.Written]

    (show,) = getattr(hints["return"], "__metadata__", (None,))

    @wraps(function)
    def command(*words: Any, as_json: bool = False, **options: Any) -> None:  # noqa: ANN401
        with ProgressBars() as progress:
            services = {"progress": progress, "ask": _ask if _can_ask() else None}
            options |= {name: services[name] for name in given_here}
            found = function(*words, **options)
        given = signature.bind(*words, **options).arguments
        answer: api.Answer = found if show is None else show(found, given)
        print_notes(answer.notes)
        print_answer(answer, as_json=as_json)
        print_written(*(options.get(name) for name in written))
        if answer.exit_code:
            sys.exit(answer.exit_code)

    parameters = [each for each in signature.parameters.values() if each.name not in given_here]
    json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)
    command.__signature__ = signature.replace(parameters=[*parameters, json])  # type: ignore[attr-defined]
    words = {name: _type_of_words(hint) for name, hint in hints.items() if name != "return"}
    command.__annotations__ = {**words, "as_json": AsJson}
    return command


def _can_ask() -> bool:
    return console.is_terminal and sys.stdin.isatty()


def _ask(question: str) -> str:
    return console.input(question).strip()


def _type_of_words(hint: Any) -> Any:  # noqa: ANN401  a type
    """The type of an argument on a command line: the first of those that Python may give."""
    if get_origin(hint) is Annotated:
        base, *rest = get_args(hint)
        return Annotated[_type_of_words(base), *rest]
    if get_origin(hint) not in (Union, UnionType):
        return hint
    first = _type_of_words(get_args(hint)[0])
    return first | None if NoneType in get_args(hint) else first
