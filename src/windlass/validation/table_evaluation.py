"""Compares predictions of a table's runs with what was measured."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import InputErrors
from windlass.validation.csv_table import UnusableRow, read_table
from windlass.validation.metrics import (
    OutOfMemoryAccuracy,
    RankAccuracy,
    RelativeErrors,
    memory_errors,
    out_of_memory_accuracy,
    rank_accuracy,
    step_errors,
)
from windlass.validation.predict_run import RunPrediction, predict_run
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import SkippedRow, rows_to_runs

_MAX_REASONS = 12
"""Reasons that are listed one by one."""
_MAX_LINES = 6
"""Line numbers that are listed for each reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of a set of predictions; a field is None if nothing was measured for it."""

    step_time: RelativeErrors | None
    memory: RelativeErrors | None
    out_of_memory: OutOfMemoryAccuracy | None
    ranking: RankAccuracy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccuracy:
    """Accuracy of one cluster's test rows in one table."""

    cluster: str
    about: str
    stack: str
    fitted_to: str
    """Rows that the cluster's constants were fitted to; empty if to none."""
    accuracy: Accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEvaluation:
    """A table with the predictions of its runs and their accuracy."""

    name: str
    rows: int
    unread: Mapping[str, int]
    """Column that says what ran and that predictions leave out -> predicted rows that fill it."""
    skipped: tuple[SkippedRow, ...]
    predictions: tuple[RunPrediction, ...]
    calibration_rows: int
    """Number of predicted rows to which constants were fitted."""
    test_rows: Accuracy
    """Accuracy of the predicted rows to which no constants were fitted."""
    all_rows: Accuracy
    """Accuracy of all predicted rows."""
    by_cluster: tuple[ClusterAccuracy, ...]
    """Accuracy of the test rows of each cluster."""
    by_precision: Mapping[str, Accuracy]
    """Accuracy of the test rows of each precision."""

    @property
    def skip_reasons(self) -> list[str]:
        """Why rows were skipped, with counts and line numbers, the most frequent reason first."""
        return _reasons(self.skipped)

    def worst_predictions(self, count: int) -> list[RunPrediction]:
        """The predictions of step time with the largest errors, the worst first."""
        timed = [prediction for prediction in self.predictions if prediction.run.step_seconds]
        return sorted(timed, key=_error_factor, reverse=True)[:count]


def evaluate_table(
    path: Path, progress: Callable[[int, int], None] | None = None
) -> TableEvaluation:
    """Predicts every row of a table with the clock that plans.

    Args:
        progress: called with the numbers of rows that are done and that there are.

    Raises:
        RequestError: the file cannot be read as a table of runs.
        InputErrors: a line has the wrong length, or no row can become a run.
    """
    table = read_table(path)
    rows = rows_to_runs(table.rows)
    skipped = [row for row in rows if isinstance(row, SkippedRow)]
    runs = [row for row in rows if isinstance(row, PublishedRun)]
    predictions = []
    for count, run in enumerate(runs, 1):
        try:
            predictions.append(predict_run(run))
        except UnusableRow as reason:
            skipped.append(
                SkippedRow(line=run.line, model=run.model, device=run.machine, reason=str(reason))
            )
        if progress is not None:
            progress(count, len(runs))
    if not predictions:
        all_rows = f"its {len(rows)} rows" if len(rows) > 1 else "its row"
        raise InputErrors(
            [f"`{path}`: no run can be predicted from {all_rows}", *_reasons(skipped)]
        )
    test = [prediction for prediction in predictions if not prediction.is_calibration_row]
    return TableEvaluation(
        name=table.name,
        rows=len(table.rows),
        unread=Counter(name for each in predictions for name in each.run.unread),
        skipped=tuple(skipped),
        predictions=tuple(predictions),
        calibration_rows=len(predictions) - len(test),
        test_rows=_accuracy(test),
        all_rows=_accuracy(predictions),
        by_cluster=tuple(
            ClusterAccuracy(
                cluster=name,
                about=predictions[0].run.cluster.about,
                stack=predictions[0].run.cluster.stack,
                fitted_to=predictions[0].run.cluster.fitted_to,
                accuracy=_accuracy(predictions),
            )
            for name, predictions in _grouped(test, lambda each: each.run.cluster.name)
        ),
        by_precision={
            name: _accuracy(predictions)
            for name, predictions in _grouped(test, lambda each: each.config.narrow or "bfloat16")
        },
    )


def _reasons(skipped: Sequence[SkippedRow]) -> list[str]:
    """`hidden` not published: 3 (line 2, 5, 7)."""
    lines_by_reason: dict[str, list[int]] = defaultdict(list)
    for row in skipped:
        lines_by_reason[row.reason].append(row.line)
    frequent = sorted(lines_by_reason.items(), key=lambda item: -len(item[1]))
    messages = []
    for reason, lines in frequent[:_MAX_REASONS]:
        listed = ", ".join(map(str, lines[:_MAX_LINES]))
        more = ", ..." if len(lines) > _MAX_LINES else ""
        messages.append(f"{reason}: {len(lines)} (line {listed}{more})")
    rest = frequent[_MAX_REASONS:]
    if rest:
        count = sum(len(lines) for _, lines in rest)
        messages.append(f"{count} for {len(rest)} other reasons")
    return messages


def _grouped(
    test: Sequence[RunPrediction], name: Callable[[RunPrediction], str]
) -> list[tuple[str, list[RunPrediction]]]:
    groups: dict[str, list[RunPrediction]] = defaultdict(list)
    for prediction in test:
        groups[name(prediction)].append(prediction)
    return sorted(groups.items())


def _accuracy(predictions: Sequence[RunPrediction]) -> Accuracy:
    return Accuracy(
        step_time=step_errors(predictions),
        memory=memory_errors(predictions),
        out_of_memory=out_of_memory_accuracy(predictions),
        ranking=rank_accuracy(predictions),
    )


def _error_factor(prediction: RunPrediction) -> float:
    measured = prediction.run.step_seconds or prediction.step_seconds
    return max(prediction.step_seconds / measured, measured / prediction.step_seconds)
