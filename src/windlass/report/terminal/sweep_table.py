"""Tables of a sweep: its trials, the best first, and how far the running ones are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.terminal.tables import bar
from windlass.units import format_bytes, format_seconds

_COLOURS = {
    "waiting": "dim", "running": "cyan", "finished": "green", "pruned": "yellow", "failed": "red",
}  # fmt: skip
_ABSENT = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial of a sweep."""

    number: int
    run: str
    """Name of its run folder."""
    state: str
    params: Mapping[str, object]
    values: tuple[float, ...] = ()
    """Its objectives; of a running trial as far as it is."""
    step: int = 0
    steps: int | None = None
    predicted_seconds: float | None = None
    """Predicted time of all its steps together."""
    predicted_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRows:
    """A sweep for a table."""

    name: str
    objectives: tuple[str, ...]
    total: int
    """Number of trials that it will have."""
    rows: tuple[TrialRow, ...]
    """In the order in which they are shown."""
    counts: Mapping[str, int]
    """Number of trials by state, also of those that are not shown."""
    importance: Mapping[str, float] = field(default_factory=dict)
    left_seconds: float | None = None
    """Predicted time to its end; None where it is not known."""


def sweep_table(sweep: SweepRows) -> RenderableType:
    """A line on the whole sweep, a row for each trial, and a bar for the importance of each key."""
    parts: list[RenderableType] = [sweep_line(sweep), _trials(sweep.objectives, sweep.rows)]
    parts += [Text(f"{row.run}: {row.reason}") for row in sweep.rows if row.state == "failed"]
    if sweep.importance:
        parts.append(_importance(sweep.importance))
    return Group(*parts)


def sweep_line(sweep: SweepRows) -> Text:
    """How many trials are in which state, and the predicted time to the end."""
    done = sum(sweep.counts.get(state, 0) for state in ("finished", "pruned", "failed"))
    counts = [f"{sweep.counts[state]} {state}" for state in _COLOURS if sweep.counts.get(state)]
    text = f"{done} of {sweep.total} trials done ({', '.join(counts) or 'none started'})"
    if sweep.left_seconds is not None and done < sweep.total:
        text += f", about {format_seconds(sweep.left_seconds)} left (predicted)"
    return Text.assemble((sweep.name, "bold"), f"  {text}")


def trial_line(objectives: Sequence[str], row: TrialRow) -> str:
    """One trial in one line, for output that is no terminal."""
    params = ", ".join(f"{key}={_shown(value)}" for key, value in row.params.items())
    values = ", ".join(f"{name} {value:.5g}" for name, value in zip(objectives, row.values))  # noqa: B905
    return f"{row.run}: {', '.join(filter(None, (row.state, values, row.reason)))} ({params})"


def _trials(objectives: Sequence[str], rows: Sequence[TrialRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    keys = list(dict.fromkeys(key for row in rows for key in row.params))
    names = _short(keys)
    for key in keys:
        table.add_column(names[key], justify="right", overflow="fold")
    for name in objectives:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("step", "predicted", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        values = [f"{value:.5g}" for value in row.values] + [_ABSENT] * len(objectives)
        seconds, memory = row.predicted_seconds, row.predicted_bytes
        table.add_row(
            str(row.number),
            Text(row.state, style=_COLOURS[row.state]),
            *(_shown(row.params.get(key)) for key in keys),
            *values[: len(objectives)],
            f"{row.step}/{row.steps}" if row.steps else _ABSENT,
            _ABSENT if seconds is None else format_seconds(seconds),
            _ABSENT if memory is None else format_bytes(memory),
        )
    return table


def _importance(importance: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for key, share in importance.items():
        table.add_row(key, f"{share:.0%}", bar(share))
    return table


def _short(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, if no other has the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
