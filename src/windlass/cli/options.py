"""What verbs share: the words of a command line become one request, and the flag `--json`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.errors import RequestError
from windlass.schema.request import Request

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
"""The flag `--json`: the same as values for other programs, in place of tables."""


def build_request(
    model: str | None,
    overrides: tuple[str, ...],
    *,
    on: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
) -> Request:
    """The request of one command line: *defaults < file < overrides*, flags and model last.

    Raises:
        RequestError: the file cannot be read.
        Faults: all keys and values that do not fit.
    """
    # `windlass train train.steps=10` names no model: the first word is an override too.
    if model is not None and "=" in model:
        overrides, model = (model, *overrides), None
    return api.make_request(model, *overrides, machine=on, memory=memory, file=file)


def split_overrides(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names, and overrides: a flag that takes many names takes the `key=value` behind them too."""
    names = tuple(word for word in words if "=" not in word)
    return names, tuple(word for word in words if "=" in word)


def require_machine_names(machines: tuple[str, ...]) -> None:
    """Refuses a flag `--on` that names nothing.

    Raises:
        RequestError: it does.
    """
    if not machines:
        raise RequestError("`--on` names no machine; `windlass machines` lists them")
