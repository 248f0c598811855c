"""Delta debugging: which of several changes turn a good run into a bad one.

Source: `ddmin` of Zeller & Hildebrandt 2002, IEEE Transactions on Software Engineering 28(2), with
the answers of earlier tests kept. A test may need several runs until it is sure of its answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, TypeVar

Change = TypeVar("Change")
TestResult = Literal["good", "bad", "unresolved"]
"""`unresolved`: the changes do not work together, or too few runs tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprits(Generic[Change]):
    """The changes that make a run bad."""

    changes: tuple[Change, ...]
    """All of them are needed: without any one the run is good. Empty if nothing makes it bad."""
    tests: int
    """Sets of changes that were tried."""
    minimal: bool
    """Whether each of `changes` is known to be needed; False where a test was unresolved, or where
    the tests ran out."""


def find_culprits(
    changes: Sequence[Change],
    test: Callable[[tuple[Change, ...]], TestResult],
    *,
    most_tests: int,
) -> Culprits[Change]:
    """A smallest set of changes with which a run is bad.

    All changes together are tried first, each half next, and so on: one culprit among n takes
    about `1 + log2(n)` tests, and two that are bad only together a few more.

    Args:
        changes: what differs between the good and the bad run, the most suspicious ones first.
        test: how a run with some of the changes turns out; without any it is good.
    """
    search = _Search(test, most_tests)
    if not changes or search.ask(tuple(changes)) != "bad":
        return Culprits(changes=(), tests=search.tests, minimal=not search.is_doubtful)
    suspects = tuple(changes)
    parts = 2
    while len(suspects) > 1 and not search.is_exhausted:
        pieces = _pieces(suspects, parts)
        smaller = search.first_bad(pieces)
        if smaller is None and parts > 2:
            smaller = search.first_bad(_without(suspects, piece) for piece in pieces)
            parts = parts if smaller is None else max(parts - 1, 2)
        elif smaller is not None:
            parts = 2
        if smaller is not None:
            suspects = smaller
            parts = min(parts, len(suspects))
        elif parts == len(suspects):
            break
        else:
            parts = min(2 * parts, len(suspects))
    minimal = not (search.is_exhausted or search.is_doubtful)
    return Culprits(changes=suspects, tests=search.tests, minimal=minimal)


class _Search(Generic[Change]):
    """Answers of tests; each set is tried once."""

    def __init__(self, test: Callable[[tuple[Change, ...]], TestResult], most_tests: int) -> None:
        self._test, self._most = test, most_tests
        self._answers: dict[tuple[Change, ...], TestResult] = {}
        self.is_exhausted = False

    @property
    def tests(self) -> int:
        return len(self._answers)

    @property
    def is_doubtful(self) -> bool:
        return "unresolved" in self._answers.values()

    def ask(self, changes: tuple[Change, ...]) -> TestResult:
        if changes not in self._answers:
            if self.tests >= self._most:
                self.is_exhausted = True
                return "unresolved"
            self._answers[changes] = self._test(changes)
        return self._answers[changes]

    def first_bad(self, sets: Iterable[tuple[Change, ...]]) -> tuple[Change, ...] | None:
        return next((one for one in sets if one and self.ask(one) == "bad"), None)


def _pieces(changes: tuple[Change, ...], count: int) -> list[tuple[Change, ...]]:
    """The changes in `count` parts of about one size, in order."""
    bounds = [round(index * len(changes) / count) for index in range(count + 1)]
    return [changes[first:last] for first, last in pairwise(bounds)]


def _without(changes: tuple[Change, ...], piece: tuple[Change, ...]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change not in piece)
