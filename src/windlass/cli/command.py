"""Makes commands of functions: the options are their arguments, and the output is their answer."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter

from windlass import api
from windlass.cli.console import ProgressBars, print_answer, print_notes, print_written

AsJson = Annotated[api.AsJson, Parameter(help="Print the result as JSON.")]


def __getattr__(place: str) -> Callable[..., None]:
    """The command of the function at a place, such as `api.dataflow.dataflow`."""
    module, _, name = place.rpartition(".")
    if not module:
        raise AttributeError(name)
    return as_command(getattr(import_module(f"windlass.{module}"), name))


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """A function that shows its progress, prints its answer, and exits with the answer's code.

    Args:
        function: takes what a command line gives, and returns an `Answer`; an argument `progress`
            is given bars, and each argument of type `Picture` is a file that it writes.
    """
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    written = [name for name, hint in hints.items() if hint == api.Picture]

    @wraps(function)
    def command(*words: Any, as_json: bool = False, **options: Any) -> None:  # noqa: ANN401
        with ProgressBars() as progress:
            if "progress" in hints:
                options["progress"] = progress
            answer: api.Answer = function(*words, **options)
        print_notes(answer.notes)
        print_answer(answer, as_json=as_json)
        print_written(*(options.get(name) for name in written))
        if answer.exit_code:
            sys.exit(answer.exit_code)

    parameters = [each for each in signature.parameters.values() if each.name != "progress"]
    json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)
    command.__signature__ = signature.replace(parameters=[*parameters, json])  # type: ignore[attr-defined]
    command.__annotations__ = {**hints, "as_json": AsJson}
    return command
