"""Flags that many commands share; importing them imports nothing else of Windlass."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import CoercionError, Parameter, Token, convert

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A flag that is off unless it is given, without a `--no-` form."""

AsJson = Annotated[Flag, Parameter(name="--json")]
"""The flag `--json`: print values for other programs instead of tables."""


def _words_of_list(kind: Any, tokens: Sequence[Token]) -> Any:  # noqa: ANN401  as cyclopts has it
    """The values of a list, whose words are parted by commas.

    An override `key=a,b` that an option which takes many words swallowed stays one word.
    """
    words = [
        word
        for token in tokens
        for word in ([token.value] if "=" in token.value else token.value.split(","))
    ]
    words = [word.strip() for word in words if word.strip()]
    try:
        return convert(kind, words)
    except CoercionError as error:
        option = f"{tokens[0].keyword} {','.join(words)}"
        numbers = "whole numbers" if kind == tuple[int, ...] else "numbers"
        raise ValueError(f"`{option}` is no list of {numbers}; write them as `1,2`") from error


_LIST = Parameter(converter=_words_of_list, negative="")
_MANY = Parameter(consume_multiple=True)

OnMachine = Annotated[str | None, Parameter(name="--on")]
"""A machine by its name in the catalogue."""

Word = Parameter(converter=lambda _, tokens: tokens[0].value, accepts_keys=False)
"""How an argument with other types from Python is read: as one word of the command line."""

AnyPath = Path | str
"""A file or a folder."""

RunsFolder = Annotated[Path | str, Parameter(name="--runs")]
"""The folder that holds the run folders."""

Names = Annotated[tuple[str, ...], _LIST]
"""An option that takes several words: `--columns a,b`, or `--columns a --columns b`."""
Shares = Annotated[tuple[float, ...], _LIST]
"""An option that takes several numbers."""
ManyNames = Annotated[tuple[str, ...], _LIST, _MANY]
"""An option that takes several words, also with spaces between them: `--on a b`."""
ManySizes = Annotated[tuple[int, ...], _LIST, _MANY]
"""An option that takes several whole numbers, also with spaces between them."""

Live = Annotated[Callable[..., Any] | None, Parameter(parse=False)]
"""A model, or what makes one, which only a Python caller can give."""

Watch = Annotated[Callable[[str, int, int | None], None] | None, Parameter(parse=False)]
"""A `Progress` or None: what shows how far the work is, which no word of a command line gives."""

Ask = Annotated[Callable[[str], str] | None, Parameter(parse=False)]
"""Asks the user a question and returns the answer; None where nobody can answer."""

Written = Annotated[Path | None, "written"]
"""A file that the command writes, and names when it is done."""
