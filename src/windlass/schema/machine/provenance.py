"""Provenance: the source of a number, and how far it can be trusted."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from windlass.document import Document

SourceKind = Literal[
    "published", "measured", "fitted", "derived", "convention", "guess", "unverified"
]  # fmt: skip
"""`published`: by the vendor or an operator. `measured`: by a program with a clock. `fitted`: to
measured runs. `derived`: computed from published figures. `convention`: assumed for lack of any
source. `guess`: by who wrote the file. `unverified`: stated somewhere, but its source could not be
read."""


class Source(Document):
    """The source of one number."""

    how: SourceKind
    source: str
    """The publication, measurement or computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDefault:
    """A value that a request left open, chosen for its model and machine."""

    key: str
    """Such as `train.batch`."""
    value: int | float
    reason: str
    """Where it comes from, to follow a comma or stand in parentheses."""


def source_of(place: str, sources: Mapping[str, Source]) -> Source | None:
    """The source of the number at `place`; None if none is stated.

    Args:
        place: dotted key, such as `device.tiers.device.capacity_bytes`.
        sources: sources by key, or by a pattern of keys in which `*` matches anything; the longest
            matching pattern wins. Several keys or patterns of one source stand between commas.
    """
    stated = {key: source for keys, source in sources.items() for key in keys.split(", ")}
    if place in stated:
        return stated[place]
    matches = [pattern for pattern in stated if fnmatchcase(place, pattern)]
    return stated[max(matches, key=len)] if matches else None
