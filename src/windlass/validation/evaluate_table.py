"""Judge: a table of measured runs beside what was predicted of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import InputErrors
from windlass.validation.csv_table import read_table
from windlass.validation.metrics import (
    OutOfMemoryAccuracy,
    RankAccuracy,
    RelativeErrors,
    memory_errors,
    out_of_memory_accuracy,
    rank_accuracy,
    step_errors,
)
from windlass.validation.predict_run import RunPrediction, predict_runs
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import SkippedRow, rows_to_runs
from windlass.validation.software_stacks import stack_catalog

_REASONS = 12
"""Reasons that are told one by one."""
_ROWS_NAMED = 6
"""Lines that are named of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How well a set of predictions holds; None of what the set says nothing about."""

    step_time: RelativeErrors | None
    memory: RelativeErrors | None
    out_of_memory: OutOfMemoryAccuracy | None
    ranking: RankAccuracy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackAccuracy:
    """The rows of one stack in one table."""

    stack: str
    about: str
    provenance: str
    fitted_from: str
    score: Accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEvaluation:
    """A table, predicted."""

    name: str
    rows: int
    unknown_columns: tuple[str, ...]
    """Columns that nothing reads."""
    skipped: tuple[SkippedRow, ...]
    predictions: tuple[RunPrediction, ...]
    calibration_rows: int
    """Rows among those predicted that constants were fitted from."""
    test_rows: Accuracy
    """Of the others."""
    all_rows: Accuracy
    """Of all rows."""
    by_stack: tuple[StackAccuracy, ...]
    """Test rows by stack."""

    @property
    def skip_reasons(self) -> list[str]:
        """Why rows could not be expressed, how many and which, the most frequent reason first."""
        return _reasons(self.skipped)

    def worst_predictions(self, count: int) -> list[RunPrediction]:
        """The rows whose step time is furthest off."""
        timed = [one for one in self.predictions if one.run.step_seconds]
        return sorted(timed, key=_off, reverse=True)[:count]


def evaluate_table(path: Path) -> TableEvaluation:
    """Predicts every row of a table with constants that were fitted beforehand.

    Raises:
        RequestError: it cannot be read as a table of runs.
        Faults: lines of another length than the head, or why none of its rows can be expressed.
    """
    table = read_table(path)
    found = rows_to_runs(table.rows, stack_catalog())
    refused = tuple(one for one in found if isinstance(one, SkippedRow))
    if len(refused) == len(found):
        count = f"its {len(found)} rows" if len(found) > 1 else "its row"
        told = [f"`{path}`: nothing can be predicted of {count}", *_reasons(refused)]
        raise InputErrors(told)
    predicted = tuple(predict_runs([one for one in found if isinstance(one, PublishedRun)]))
    others = [one for one in predicted if not one.is_calibration_row]
    stacks = sorted({one.run.stack for one in predicted})
    return TableEvaluation(
        name=table.name,
        rows=len(table.rows),
        unknown_columns=table.unknown_columns,
        skipped=refused,
        predictions=predicted,
        calibration_rows=len(predicted) - len(others),
        test_rows=_score(others),
        all_rows=_score(predicted),
        by_stack=tuple(_part([one for one in others if one.run.stack == stack]) for stack in stacks
                    if any(one.run.stack == stack for one in others)),
    )  # fmt: skip


def _reasons(refused: Sequence[SkippedRow]) -> list[str]:
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


def _part(found: Sequence[RunPrediction]) -> StackAccuracy:
    used = found[0].calibration
    return StackAccuracy(
        stack=used.stack,
        about=stack_catalog().stack(used.stack).about,
        provenance=used.provenance,
        fitted_from=used.fitted_from,
        score=_score(found),
    )


def _score(found: Sequence[RunPrediction]) -> Accuracy:
    return Accuracy(
        step_time=step_errors(found),
        memory=memory_errors(found),
        out_of_memory=out_of_memory_accuracy(found),
        ranking=rank_accuracy(found),
    )


def _off(one: RunPrediction) -> float:
    measured = one.run.step_seconds or one.step_seconds
    return max(one.step_seconds / measured, measured / one.step_seconds)
