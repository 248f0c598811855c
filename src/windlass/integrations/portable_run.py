"""A run as every tracker can hold it: settings, tags, and rows of named numbers."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Literal, SupportsFloat, cast
from uuid import UUID

from windlass.document import Document
from windlass.errors import RequestError, is_text
from windlass.schema import ConfigScalar, ConfigValue, RunState
from windlass.tracking import JournalRow, calendar_time, without_secrets

Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]
"""The software that wrote a run."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_DEPTH = 50
_TOO_DEEP = "[nested too deeply]"
"""The value of a setting that contains itself, or too many levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableRun:
    """One run, free of the files that hold it."""

    origin: str
    """The tracker that wrote it, or `windlass`."""
    origin_id: str
    """What its tracker calls it; unique there."""
    name: str
    rows: Sequence[JournalRow]
    """In the order in which they were written; a step may have several."""
    started: float
    """Seconds since 1970."""
    ended: float
    """Seconds since 1970; of its last row if its tracker does not say."""
    state: RunState | None
    """None if it was going on when it was read."""
    config: Mapping[str, ConfigValue] = field(default_factory=lambda: MappingProxyType({}))
    """Settings by dotted key."""
    tags: tuple[str, ...] = ()
    notes: str = ""
    project: str | None = None
    group: str | None = None
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What else its tracker knows, such as `host` and `commit`."""
    left_out: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """How many things of each kind were not taken over."""
    documents: Mapping[str, Document] = field(default_factory=lambda: MappingProxyType({}))
    """Further files of the run folder, such as its plan and what is predicted of it."""
    meta: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Further fields of the opening event."""

    @property
    def start(self) -> float:
        """Seconds since 1970, within what a calendar has; a damaged store may say anything."""
        return calendar_time(self.started)

    @property
    def id(self) -> str:
        """The id in the record: the same for the same run, however often it is read.

        A UUID of version 8 (RFC 9562): the run's start in milliseconds, so that ids sort by time,
        then a hash of its origin.
        """
        name = f"{self.origin}\0{self.origin_id}".encode()
        noise = int.from_bytes(hashlib.sha256(name).digest()[:10])
        start = min(int(self.start * 1000), (1 << 48) - 1)
        low = noise & (1 << 62) - 1
        return str(UUID(int=start << 80 | 8 << 76 | (noise >> 62 & 0xFFF) << 64 | 0b10 << 62 | low))


def flat_config(config: object) -> dict[str, ConfigValue]:
    """Settings by dotted key: nested mappings, dataclasses and `argparse` results are flattened.

    Values that no file of settings holds, such as classes, become their text. Texts that look like
    secrets are replaced. Where two values have one name, as in `{"a.b": 1, "a": {"b": 2}}`, the
    later one gets a number.

    Raises:
        RequestError: it has no keys.
    """
    tree = _mapping(config)
    if tree is None:
        raise RequestError(
            f"a config of type `{type(config).__name__}` has no keys; give a dict, a dataclass or "
            "the result of argparse"
        )
    values: dict[str, ConfigValue] = {}
    for name, value in _flat(tree, "", ()):
        values[free_name(name, values)] = value
    return values


def free_name(name: str, taken: Container[str]) -> str:
    """The name, with a number behind it if it is taken."""
    numbered = (f"{name} ({number})" for number in count(2))
    return name if name not in taken else next(one for one in numbered if one not in taken)


def _flat(
    tree: Mapping[object, object], prefix: str, parents: tuple[int, ...]
) -> Iterator[tuple[str, ConfigValue]]:
    if id(tree) in parents or len(parents) > _MAX_DEPTH:
        yield prefix[:-1], _TOO_DEEP
        return
    for key, value in tree.items():
        name = prefix + clean_text(str(key))
        nested = _mapping(value)
        if nested is not None:
            yield from _flat(nested, f"{name}.", (*parents, id(tree)))
        elif isinstance(value, list | tuple):
            yield name, tuple(_scalar(item) for item in value)
        else:
            yield name, _scalar(value)


def _mapping(value: object) -> Mapping[object, object] | None:
    """The keys and values of a mapping or of an object that stands for one; None of any other."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if type(value).__name__ == "Namespace":
        return cast(Mapping[object, object], vars(value))
    return None


def _scalar(value: object) -> ConfigScalar:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return without_secrets(clean_text(value))
    item = getattr(value, "item", None)  # a number of numpy or torch
    if callable(item) and getattr(value, "shape", None) == ():
        return _scalar(cast(Callable[[], object], item)())
    return without_secrets(clean_text(str(value)))


def clean_text(value: str) -> str:
    """The text as UTF-8 can hold it, without NUL."""
    return value if is_text(value) else value.encode(errors="replace").decode().replace("\0", "?")


def number(value: object) -> float | None:
    """The number in a JSON value, where a text may be `NaN` or `Infinity`; None if it is none.

    Integers beyond 2^53 lose digits, as in every journal.
    """
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(cast(SupportsFloat, value))
    except OverflowError:
        return None


def rows_of_points(points: Iterable[tuple[int, float, str, float]]) -> tuple[JournalRow, ...]:
    """Rows of points (step, time, name, value); neighbours of one moment share a row."""
    rows: list[JournalRow] = []
    values: dict[str, float] = {}
    moment: tuple[int, float] | None = None
    for step, time, name, value in points:
        if moment != (step, time) or name in values:
            moment, values = (step, time), {}
            rows.append(JournalRow(step=step, time=time, values=values))
        values[name] = value
    return tuple(rows)
