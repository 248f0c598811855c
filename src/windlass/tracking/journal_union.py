"""The union of two copies of one journal: no record that one of them has is lost.

A copy may be shorter than the other, and each may be damaged at other places. So records are
compared and not bytes: of two copies the one counts that has all records of the other, and if each
has some that the other lacks, a new copy has those of both, in their order.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from windlass.tracking.journal import EVENT, ROW
from windlass.tracking.journal_reader import (
    JournalRecords,
    RawRecord,
    parse_raw_records,
    parse_records,
)


class JournalUnion(NamedTuple):
    """What unites two copies of one journal."""

    content: bytes
    """All records of both: one of the copies wherever that has them all, and ours if both do."""
    theirs_is_worse: bool
    """Whether their copy has more bytes that hold no record than ours."""


def unite_journals(ours: bytes, theirs: bytes) -> JournalUnion | None:
    """A journal with all records of two copies; None if they are of two writers.

    Args:
        theirs: another one.
    """
    if ours.startswith(theirs):
        return JournalUnion(ours, theirs_is_worse=False)
    if theirs.startswith(ours):
        return JournalUnion(theirs, theirs_is_worse=False)
    (own, own_records), (others, other_records) = map(parse_raw_records, (ours, theirs))
    if not _have_one_writer(own, others):
        return None
    damage, their_damage = (
        sum(map(len, records.skipped)) for records in (own_records, other_records)
    )
    holds_theirs, holds_ours = _contains(own, others), _contains(others, own)
    if holds_theirs:
        is_best = damage <= their_damage or not holds_ours or len(ours) <= len(theirs)
        return JournalUnion(ours if is_best else theirs, damage < their_damage)
    united = theirs if holds_ours else b"".join(_union(own, others))
    # Names that a stranger has put into one copy may hide rows of the other.
    rows = _named_rows(other_records if holds_ours else parse_records(united))
    parts = (own_records,) if holds_ours else (own_records, other_records)
    if not all(_named_rows(records) <= rows for records in parts):
        return None
    return JournalUnion(united, damage < their_damage)


def _named_rows(records: JournalRecords) -> "Counter[tuple[tuple[str, ...], bytes]]":
    return Counter((rows.names, payload) for rows in records.rows for payload in rows.payloads)


def _have_one_writer(ours: Sequence[RawRecord], theirs: Sequence[RawRecord]) -> bool:
    """Whether two journals of one rank and attempt are copies of one.

    Rows and events have their writer's clock in them, and where a copy has none of them left, there
    is nothing to lose. Where damage has left none that both have, the beginning of a copy may be
    missing, and its records then lie where the other has none.
    """
    own, others = ({r.content for r in records if r.kind in (ROW, EVENT)}
                   for records in (ours, theirs))  # fmt: skip
    if not own or not others or own & others or ours[0].content == theirs[0].content:
        return True
    return ours[0].offset != theirs[0].offset and not _overlap(ours, theirs)


def _overlap(ours: Sequence[RawRecord], theirs: Sequence[RawRecord]) -> bool:
    end = 0
    for record in sorted((*ours, *theirs), key=lambda record: record.offset):
        if record.offset < end:
            return True
        end = record.offset + len(record.content)
    return False


def _contains(records: Sequence[RawRecord], part: Sequence[RawRecord]) -> bool:
    """Whether some records have all of others, in their order."""
    left = iter(records)
    return all(any(one.content == record.content for one in left) for record in part)


def _union(ours: Sequence[RawRecord], theirs: Sequence[RawRecord]) -> Iterator[bytes]:
    """All records of both, in the order of both, those that both have once."""
    shared = _shared(ours, theirs)
    aligned = all(ours[i].offset == theirs[j].offset for i, j in shared)
    order: Callable[[RawRecord], float] = _offset if aligned else _step
    at, other = 0, 0
    for i, j in (*shared, (len(ours), len(theirs))):
        yield from _in_order(ours[at:i], theirs[other:j], order)
        if i < len(ours):
            yield ours[i].content
        at, other = i + 1, j + 1


def _in_order(
    ours: Sequence[RawRecord], theirs: Sequence[RawRecord], order: Callable[[RawRecord], float]
) -> Iterator[bytes]:
    """Two parts that have nothing in common, each in its own order."""
    at = other = 0
    while at < len(ours) and other < len(theirs):
        first, second = ours[at], theirs[other]
        if (order(first), first.kind, first.content) <= (
            order(second), second.kind, second.content,
        ):  # fmt: skip
            yield first.content
            at += 1
        else:
            yield second.content
            other += 1
    yield from (record.content for record in (*ours[at:], *theirs[other:]))


def _offset(record: RawRecord) -> float:
    return record.offset


def _step(record: RawRecord) -> float:
    """The step of a record, where damage has moved what follows it; the first for all others."""
    return record.step or 0


def _shared(ours: Sequence[RawRecord], theirs: Sequence[RawRecord]) -> Sequence[tuple[int, int]]:
    """Indices of records that both have, in the order of both.

    They are the longest increasing sequence, as in patience sorting.
    """
    places = {key: j for j, key in enumerate(_numbered(theirs))}
    pairs = [(i, places[key]) for i, key in enumerate(_numbered(ours)) if key in places]
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        last[length : length + 1] = [index]
    found: list[tuple[int, int]] = []
    index = last[-1] if last else -1
    while index >= 0:
        found.append(pairs[index])
        index = before[index]
    return found[::-1]


def _numbered(records: Sequence[RawRecord]) -> Iterator[tuple[bytes, int]]:
    """Each record, and how many like it stand before it: the names of rows are repeated."""
    counts: dict[bytes, count[int]] = {}
    for record in records:
        yield record.content, next(counts.setdefault(record.content, count()))
