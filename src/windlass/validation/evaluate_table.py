"""Judge: a table of measured runs beside what was predicted of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import Faults
from windlass.validation.csv_table import read_table
from windlass.validation.metrics import (
    Calls,
    Errors,
    Ranks,
    memory_calls,
    memory_errors,
    ranks,
    step_errors,
)
from windlass.validation.predict_run import Predicted, predict
from windlass.validation.row_to_run import Refused, express
from windlass.validation.runs import Run
from windlass.validation.software_stacks import catalogue

_REASONS = 12
"""Reasons that are told one by one."""
_ROWS_NAMED = 6
"""Lines that are named of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well a set of predictions holds; None of what the set says nothing about."""

    steps: Errors | None
    memory: Errors | None
    calls: Calls | None
    ranks: Ranks | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one stack in one table."""

    stack: str
    about: str
    provenance: str
    fitted_from: str
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A table, predicted."""

    name: str
    rows: int
    unknown: tuple[str, ...]
    """Columns that nothing reads."""
    refused: tuple[Refused, ...]
    predicted: tuple[Predicted, ...]
    calibrating: int
    """Rows among those predicted that constants were fitted from."""
    test: Score
    """Of the others."""
    every: Score
    """Of all rows."""
    parts: tuple[Part, ...]
    """Test rows by stack."""

    @property
    def reasons(self) -> list[str]:
        """Why rows could not be expressed, how many and which, the most frequent reason first."""
        return _reasons(self.refused)

    def worst(self, count: int) -> list[Predicted]:
        """The rows whose step time is furthest off."""
        timed = [one for one in self.predicted if one.run.step_seconds]
        return sorted(timed, key=_off, reverse=True)[:count]


def judge(path: Path) -> Judged:
    """Predicts every row of a table with constants that were fitted beforehand.

    Raises:
        RequestError: it cannot be read as a table of runs.
        Faults: lines of another length than the head, or why none of its rows can be expressed.
    """
    table = read_table(path)
    found = express(table.rows, catalogue())
    refused = tuple(one for one in found if isinstance(one, Refused))
    if len(refused) == len(found):
        count = f"its {len(found)} rows" if len(found) > 1 else "its row"
        told = [f"`{path}`: nothing can be predicted of {count}", *_reasons(refused)]
        raise Faults(told)
    predicted = tuple(predict([one for one in found if isinstance(one, Run)]))
    others = [one for one in predicted if not one.calibrating]
    stacks = sorted({one.run.stack for one in predicted})
    return Judged(
        name=table.name,
        rows=len(table.rows),
        unknown=table.unknown,
        refused=refused,
        predicted=predicted,
        calibrating=len(predicted) - len(others),
        test=_score(others),
        every=_score(predicted),
        parts=tuple(_part([one for one in others if one.run.stack == stack]) for stack in stacks
                    if any(one.run.stack == stack for one in others)),
    )  # fmt: skip


def _reasons(refused: Sequence[Refused]) -> list[str]:
    """`hidden` not published: 3 (line 2, 5, 7)."""
    lines: dict[str, list[int]] = defaultdict(list)
    for one in refused:
        lines[one.reason].append(one.line)
    frequent = sorted(lines.items(), key=lambda item: -len(item[1]))
    told = []
    for reason, at in frequent[:_REASONS]:
        named = ", ".join(map(str, at[:_ROWS_NAMED]))
        more = ", ..." if len(at) > _ROWS_NAMED else ""
        told.append(f"{reason}: {len(at)} (line {named}{more})")
    rest = frequent[_REASONS:]
    if rest:
        count = sum(len(at) for _, at in rest)
        told.append(f"{count} for {len(rest)} other reasons")
    return told


def _part(found: Sequence[Predicted]) -> Part:
    used = found[0].calibration
    return Part(
        stack=used.stack,
        about=catalogue().stack(used.stack).about,
        provenance=used.provenance,
        fitted_from=used.fitted_from,
        score=_score(found),
    )


def _score(found: Sequence[Predicted]) -> Score:
    return Score(
        steps=step_errors(found),
        memory=memory_errors(found),
        calls=memory_calls(found),
        ranks=ranks(found),
    )


def _off(one: Predicted) -> float:
    measured = one.run.step_seconds or one.step_seconds
    return max(one.step_seconds / measured, measured / one.step_seconds)
