"""`windlass validate here`: predicts plans drawn at random, runs them, and prints how far off."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.table import Table

from windlass import api
from windlass.cli.console import (
    ProgressBars,
    console,
    error_console,
    print_json,
    print_line,
    print_written,
)

Rows = Sequence[api.ValidatedRun]


def validate_here(count: int, seed: int, stack: str, *, as_json: bool) -> None:
    """Names each run as it begins, prints it as it ends, then the errors by sort of plan.

    The worst sort comes first.
    """
    rows: list[api.ValidatedRun] = []
    with ProgressBars() as progress:
        progress("validating", 0, count)
        try:
            for row in api.validate_random_plans(count, seed, _print_begun, stack):
                rows.append(row)
                progress("validating", len(rows), count)
                if not as_json:
                    print_line(_line(row))
        finally:
            if len(rows) < count:
                print_written(api.validated_runs_file(seed))
    if as_json:
        print_json(rows)
        return
    measured = [row for row in rows if row.measurement is not None]
    if measured:
        console.print(_summary(measured))
        print_line("error: |predicted / measured - 1|; bias: median of predicted / measured - 1")
    cut = sum(row.cut is not None for row in rows)
    if cut:
        print_line(
            f"cut: {cut} plans, whose steps as drawn are predicted to take longer than two seconds"
        )
    failed = len(rows) - len(measured)
    print_line(f"{len(rows)} plans of seed {seed}" + (f", {failed} did not run" if failed else ""))
    print_written(api.validated_runs_file(seed))


def _print_begun(run: str) -> None:
    """Says on stderr what runs now: a row may take a minute."""
    error_console.print(f"running {run}", soft_wrap=True)


def _line(row: api.ValidatedRun) -> str:
    """One run in one line: its plan, and predicted beside measured."""
    heading = f"{row.number:3d} {row.sort:19s} "
    run = row.measurement
    if run is None:
        return f"{heading}did not run: {' '.join((row.problem or '').split())}"
    mark = {True: " ", False: "!"}
    return (
        f"{heading}predicted {run.predicted_seconds * 1e3:6.0f} ms, measured "
        f"{run.measured_seconds * 1e3:6.0f} ({run.seconds_error:+6.1%}{mark[run.is_time_inside]}); "
        f"{run.predicted_bytes / 2**20:5.0f} MiB, measured {run.measured_bytes / 2**20:5.0f} "
        f"({run.bytes_error:+6.1%}{mark[run.is_memory_inside]}); machine {run.drift - 1:+4.0%}; "
        f"{row.model} {run.plan}{' (cut)' if row.cut else ''}"
    )


def _summary(rows: Rows) -> Table:
    """Errors of time and memory by sort, worst median error of time first, all rows last."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("sort of plan", no_wrap=True)
    heads = ("median", "p90", "worst", "bias", "inside")
    for head in ("plans", *(f"time {heads[0]}", *heads[1:]), *(f"memory {heads[0]}", *heads[1:])):
        table.add_column(head, justify="right")
    by_sort: dict[str, list[api.ValidatedRun]] = {}
    for row in rows:
        by_sort.setdefault(row.sort, []).append(row)
    ordered = sorted(by_sort, key=lambda sort: -_median(by_sort[sort], _seconds_error))
    for sort in ordered:
        table.add_row(sort, str(len(by_sort[sort])), *_figures(by_sort[sort]))
    table.add_section()
    table.add_row("all", str(len(rows)), *_figures(rows))
    return table


def _figures(rows: Rows) -> tuple[str, ...]:
    times = _errors(rows, _seconds_error), _share(rows, lambda run: run.is_time_inside)
    memory = _errors(rows, _bytes_error), _share(rows, lambda run: run.is_memory_inside)
    return (*times[0], times[1], *memory[0], memory[1])


def _errors(rows: Rows, error: Callable[[api.Measurement], float]) -> tuple[str, ...]:
    """Median, 90th percentile and worst of the sizes of errors, and their median with sign."""
    signed = [error(run) for run in _measurements(rows)]
    sizes = sorted(map(abs, signed))
    p90 = sizes[max(0, round(0.9 * len(sizes) + 0.5) - 1)]
    figures = (statistics.median(sizes), p90, sizes[-1])
    return (*(f"{figure:.1%}" for figure in figures), f"{statistics.median(signed):+.1%}")


def _share(rows: Rows, holds: Callable[[api.Measurement], bool]) -> str:
    return f"{statistics.fmean(map(holds, _measurements(rows))):.0%}"


def _median(rows: Rows, error: Callable[[api.Measurement], float]) -> float:
    return statistics.median(abs(error(run)) for run in _measurements(rows))


def _measurements(rows: Rows) -> Iterable[api.Measurement]:
    return [row.measurement for row in rows if row.measurement is not None]


def _seconds_error(run: api.Measurement) -> float:
    return run.seconds_error


def _bytes_error(run: api.Measurement) -> float:
    return run.bytes_error
