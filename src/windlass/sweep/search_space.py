"""The space that a sweep searches: keys of a request, each with a range or choices.

A range is `1e-4..1e-2:log`, `0..0.3`, `1..5` (whole numbers) or `16..64:step=16`; choices are
`1,2,4`.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from windlass.errors import RequestError, shorten

Scalar = str | int | float | bool
Choice = Scalar | tuple[Scalar, ...]
"""One value that a key can have; a tuple is a list in a file."""
_NUMBER = r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})((?::[a-z]+(?:={_NUMBER})?)*)")
_RANGE_START = re.compile(rf"{_NUMBER}\.\.")
_GRID_POINTS = 5
"""Points that a grid takes of a range of real numbers, unless `:points=` says how many."""
_MOST_POINTS = 10_000
_HOW_TO = "write `1e-4..1e-2:log`, `0..0.3`, `1..5`, `16..64:step=16`, or choices as `1,2,4`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One key of the request that a sweep varies."""

    key: str
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    """Lower end of a range, which belongs to it."""
    high: float = 0.0
    log: bool = False
    """Whether equal ratios are equally likely, and not equal differences."""
    step: int = 1
    """Distance of the whole numbers of a range."""
    choices: tuple[Choice, ...] = ()
    """The values of a choice; of a range those that a grid takes."""

    @property
    def is_finite(self) -> bool:
        """Whether there are only so many values."""
        return self.kind != "float"

    def index(self, value: object) -> int:
        """The position of a choice; a list that was read from a file is one as well.

        Raises:
            ValueError: it is no choice.
        """
        return self.choices.index(tuple(value) if isinstance(value, list) else value)

    def position(self, value: Choice) -> float:
        """Where a value lies between both ends of the dimension, from 0 to 1."""
        if self.kind == "choice" or not isinstance(value, int | float):
            return self.index(value) / max(1, len(self.choices) - 1)
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def is_range_or_choices(text: str) -> bool:
    """Whether the value of an override is a range or choices; a list in brackets is one value."""
    text = text.strip()
    return not text.startswith("[") and ("," in text or _RANGE_START.match(text) is not None)


def parse_dimension(key: str, text: str | Sequence[Choice]) -> Dimension:
    """The dimension of a key, from its range or choices.

    Args:
        text: as a command line or a file has it; a sequence holds the choices themselves.

    Raises:
        RequestError: it is no range and no choices, or an empty one.
    """
    if not isinstance(text, str):
        return _choices(key, tuple(tuple(v) if isinstance(v, list) else v for v in text))
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        if "," not in text:
            raise RequestError(f"`{key}` = {shorten(repr(text))} is no range; {_HOW_TO}")
        return _choices(key, tuple(_scalar(part.strip()) for part in text.split(",")))
    low, high, options = match[1], match[2], match[3]
    flags: dict[str, str] = {}
    for option in filter(None, options.split(":")):
        name, _, value = option.partition("=")
        if name not in ("log", "step", "points") or (name == "log") == bool(value):
            raise RequestError(f"`{key}`: `:{option}` means nothing; {_HOW_TO}")
        flags[name] = value
    return _range(key, low, high, flags)


def _range(key: str, low: str, high: str, flags: dict[str, str]) -> Dimension:
    whole = all(re.fullmatch(r"[-+]?[0-9_]+", end) for end in (low, high))
    first, last = float(low), float(high)
    log = "log" in flags
    step = float(flags.get("step", 1))
    points = float(flags.get("points", _GRID_POINTS))
    faults = [
        (not (math.isfinite(first) and math.isfinite(last)), "both ends should be finite"),
        (first > last, f"the lower end {first:g} is above the upper end {last:g}"),
        (log and first <= 0, f"a logarithmic range starts above 0, not at {first:g}"),
        ("step" in flags and not whole, "only a range of whole numbers has a step"),
        (step < 1 or step % 1 != 0, f"the step {step:g} should be a whole number above 0"),
        (log and "step" in flags, "a logarithmic range has no step"),
        (
            not 2 <= points <= _MOST_POINTS or points % 1 != 0,
            f"a grid has 2 to {_MOST_POINTS} points of a range, not {points:g}",
        ),
    ]
    for is_wrong, reason in faults:
        if is_wrong:
            raise RequestError(f"`{key}` = `{low}..{high}`: {reason}")
    kind: Literal["float", "int"] = "int" if whole else "float"
    if whole and not log and "points" not in flags:
        stride = max(int(step), math.ceil((last - first) / _MOST_POINTS))
        grid: tuple[Choice, ...] = tuple(range(int(first), int(last) + 1, stride))
    else:
        grid = tuple(_grid(first, last, int(points), log=log, whole=whole))
    return Dimension(
        key=key, kind=kind, low=first, high=last, log=log,
        step=int(step), choices=grid,
    )  # fmt: skip


def _grid(low: float, high: float, points: int, *, log: bool, whole: bool) -> Iterator[Choice]:
    """Evenly spaced values of a range, each once."""
    last: float | None = None
    for index in range(points):
        share = index / (points - 1)
        value = low * (high / low) ** share if log else low + (high - low) * share
        value = round(value) if whole else float(f"{value:.6g}")
        if value != last:
            yield value
        last = value


def _choices(key: str, values: tuple[Choice, ...]) -> Dimension:
    if not values or len(set(map(repr, values))) < len(values):
        raise RequestError(
            f"`{key}` = {shorten(repr(list(values)))}: name at least one choice, and each of them "
            "once"
        )
    if "" in values:
        raise RequestError(f"`{key}`: one choice is empty; {_HOW_TO}")
    return Dimension(key=key, kind="choice", choices=values)


def _scalar(text: str) -> Scalar:
    """The TOML value of a choice; anything that is not TOML is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return text
    return value if isinstance(value, str | int | float | bool) else text


def grid_points(space: Sequence[Dimension]) -> int:
    """Number of points of the grid over a space."""
    return math.prod(len(dimension.choices) for dimension in space)


def grid_point(space: Sequence[Dimension], number: int) -> dict[str, Choice]:
    """One point of the grid, of which the last dimension changes first."""
    values: dict[str, Choice] = {}
    for dimension in reversed(space):
        number, index = divmod(number, len(dimension.choices))
        values[dimension.key] = dimension.choices[index]
    return {dimension.key: values[dimension.key] for dimension in space}


def end_points(space: Sequence[Dimension]) -> Iterator[dict[str, Choice]]:
    """Points that together have both ends of every range and all choices."""
    ends = [
        d.choices if d.kind == "choice" else (d.choices[0], d.choices[-1]) for d in space
    ]  # fmt: skip
    first = [values[0] for values in ends]
    yield dict(zip((d.key for d in space), first, strict=True))
    for index, values in enumerate(ends):
        for value in values[1:]:
            point = [*first[:index], value, *first[index + 1 :]]
            yield dict(zip((d.key for d in space), point, strict=True))
