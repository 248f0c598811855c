"""A sweep as tables and figures take it."""

from collections.abc import Sequence

from windlass.experiments.sweeping.sweep import Sweep
from windlass.report import SweepAxis, SweepLine, SweepRows, TrialRow, sweep_figure
from windlass.sweep import Dimension, SweepRequest, SweepStatus, Trial, best_trials, ranked_trials

_ORDER = ("running", "finished", "pruned", "waiting", "failed")
"""States of trials in the order of a table."""


def sweep_rows(sweep: Sweep | SweepStatus, *, most: int | None = None) -> SweepRows:
    """A sweep as a table shows it, the best trials behind those that run.

    Args:
        sweep: a sweep, whether it goes on or not.
        most: most trials; None takes all.
    """
    request, trials = sweep.request, sweep.trials
    rows = [_row(trial, sweep) for trial in _ordered(request, trials)]
    running = [row for row in rows if row.state == "running"]
    open_seconds = [row.predicted_seconds for row in rows if row.predicted_seconds is not None]
    left = None
    if open_seconds:
        unasked = max(0, request.total - len(rows))
        waiting = [row for row in rows if row.state == "waiting"]
        mean = sum(open_seconds) / len(open_seconds)
        left = mean * unasked + sum(row.predicted_seconds or 0.0 for row in waiting)
        left += sum(_left(row) for row in running)
        left /= request.jobs or 1
    return SweepRows(
        name=request.name,
        objectives=tuple(name for name, _ in request.directions()),
        total=request.total,
        rows=tuple(rows if most is None else rows[:most]),
        counts={state: sum(row.state == state for row in rows) for state in _ORDER},
        importance=sweep.importance if isinstance(sweep, Sweep) else {},
        left_seconds=left,
    )


def draw_sweep(sweep: Sweep) -> str:
    """SVG file: parallel coordinates of the trials, and the importance of each key."""
    request = sweep.request
    space = request.dimensions()
    trials = [trial for trial in _ordered(request, sweep.trials) if trial.values]
    axes = [_axis(dimension) for dimension in space]
    for index, (name, _) in enumerate(request.directions()):
        values = [trial.values[index] for trial in trials]
        axes.append(SweepAxis(name=name, low=min(values, default=0), high=max(values, default=1)))
    lines = [
        SweepLine(
            number=trial.number,
            values=(*(_place(one, trial.params[one.key]) for one in space), *trial.values),
            rank=index / max(1, len(trials) - 1),
            is_pruned=trial.state == "pruned",
        )
        for index, trial in enumerate(trials)
    ]
    return sweep_figure(axes, lines, sweep.importance, f"Sweep {request.name}")


def _ordered(request: SweepRequest, trials: Sequence[Trial]) -> list[Trial]:
    """Running trials, then those with a result, the best first, then the others."""
    ranked = ranked_trials(request, trials)
    front = best_trials(request, trials)
    rest = [trial for trial in trials if trial not in ranked]
    going = [trial for trial in rest if trial.state == "running"]
    behind = [trial for trial in ranked if trial not in front]
    return [*going, *front, *behind, *(trial for trial in rest if trial not in going)]


def _row(trial: Trial, sweep: Sweep | SweepStatus) -> TrialRow:
    values = sweep.values.get(trial.number) if isinstance(sweep, SweepStatus) else None
    step = trial.pruned_at or (trial.steps or 0 if trial.state == "finished" else 0)
    return TrialRow(
        number=trial.number,
        run=trial.run,
        state=trial.state,
        params=trial.params,
        values=values.last() if values is not None and values.step else trial.values,
        step=values.step if values is not None else step,
        steps=trial.steps,
        predicted_seconds=trial.predicted_seconds,
        predicted_bytes=trial.predicted_bytes,
        reason=trial.reason,
    )


def _left(row: TrialRow) -> float:
    """Predicted seconds to the end of a running trial."""
    if not row.steps or row.predicted_seconds is None:
        return 0.0
    return row.predicted_seconds * (1 - row.step / row.steps)


def _axis(dimension: Dimension) -> SweepAxis:
    name = dimension.key.rpartition(".")[2]
    if dimension.kind == "choice":
        choices = tuple(map(str, dimension.choices))
        return SweepAxis(name=name, low=0.0, high=len(choices) - 1.0, choices=choices)
    return SweepAxis(name=name, low=dimension.low, high=dimension.high, log=dimension.log)


def _place(dimension: Dimension, value: object) -> float:
    """A value on its axis; of a choice its position."""
    if dimension.kind == "choice":
        return float(dimension.index(value))
    return float(value)  # type: ignore[arg-type]  # a range has numbers
