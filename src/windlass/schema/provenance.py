"""Provenance: where a number comes from, and how far it can be trusted."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from windlass.document import Document

SourceKind = Literal["published", "measured", "fitted", "derived", "convention", "unverified"]
"""`published`: by who makes or runs it. `measured`: by a program that reads a clock. `fitted`: to
measured runs. `derived`: computed from published figures. `convention`: taken for want of any.
`unverified`: said somewhere, and no source of it could be read."""


class Source(Document):
    """Where one number comes from."""

    how: SourceKind
    source: str
    """The publication, measurement or computation."""


def source_of(place: str, sources: Mapping[str, Source]) -> Source | None:
    """The source of the number in `place`; None if none is stated.

    Args:
        place: dotted, such as `device.tiers.near.capacity_bytes`.
        sources: by place, or by a pattern of places in which `*` stands for anything; the longest
            pattern that fits wins.
    """
    if place in sources:
        return sources[place]
    fitting = [pattern for pattern in sources if fnmatchcase(place, pattern)]
    return sources[max(fitting, key=len)] if fitting else None
