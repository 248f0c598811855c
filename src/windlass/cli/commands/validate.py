"""`windlass validate`: compares predictions with runs on this machine, or with published runs."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from windlass import api
from windlass.api import AsJson
from windlass.cli.console import (
    ProgressBars,
    console,
    error_console,
    print_bullets,
    print_json,
    print_line,
    print_written,
)
from windlass.errors import InputErrors, RequestError, did_you_mean
from windlass.validation import (
    Accuracy,
    RelativeErrors,
    RunPrediction,
    TableEvaluation,
)

_DEFAULT_COUNT = 10
"""Plans of each sort, once."""


def validate(
    *what: str,
    count: Annotated[int | None, Parameter(name="--random")] = None,
    seed: int | None = None,
    stack: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with measurements: plans run here, or tables of published runs.

    For example: `windlass validate here --random 40 --seed 1` or `windlass validate *.csv`.

    Args:
        what: `here` (the default) trains a few steps under plans drawn at random, each in a fresh
            process, about half a minute each, or a minute where layers are compiled; what runs is
            named on stderr with its predicted step. A run that was measured is kept, and an
            interrupted validation goes on with the rest. `TABLE.csv ...` predicts the runs of these
            tables.
        count: With `here`: number of plans, one of each sort (10) by default.
        seed: With `here`: which plans are drawn, 0 by default.
        stack: With `here`: what runs the plans, `windlass` (the default) or `torch`, whose plans
            are for two processes.
        as_json: Print the rows as JSON.
    """
    tables = [name for name in what if name != api.HERE]
    if tables and len(tables) < len(what):
        raise RequestError(
            f"`{api.HERE}` cannot be combined with tables; leave out `{tables[0]}` or `{api.HERE}`"
        )
    if tables:
        if (count, seed, stack) != (None, None, None):
            raise RequestError(
                f"`--random`, `--seed` and `--stack` draw plans to run {api.HERE}; "
                "leave them out with tables"
            )
        wrong = [name for name in tables if not name.lower().endswith(".csv")]
        if wrong:
            raise RequestError(
                f"cannot validate `{wrong[0]}`{did_you_mean(wrong[0], [api.HERE])}; write "
                f"`{api.HERE}`, or name CSV files of measured runs"
            )
        with ProgressBars() as progress:
            evaluations, problems = api.evaluate_tables(
                tables, lambda done, count: progress("predicting rows", done, count)
            )
        if evaluations or as_json:
            print_evaluations(evaluations, as_json=as_json)
        if problems:
            raise InputErrors(problems)
        return
    validate_here(
        _DEFAULT_COUNT if count is None else count, seed or 0, stack or "windlass", as_json=as_json
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


_WORST_SHOWN = 5


def print_evaluations(evaluations: Sequence[TableEvaluation], *, as_json: bool) -> None:
    """Prints the accuracy for each table, or all rows as JSON."""
    if as_json:
        print_json([_evaluation_json(evaluation) for evaluation in evaluations])
        return
    for evaluation in evaluations:
        _print_evaluation(evaluation)
    print_line("bias: mean of signed errors, + predicted too long; inside: in 80 % intervals")
    print_line("const.: mean error of one fitted constant, time = constant x FLOP / devices")


def _print_evaluation(evaluation: TableEvaluation) -> None:
    heading = f"{evaluation.name}: {evaluation.rows} rows, {len(evaluation.predictions)} predicted"
    if evaluation.calibration_rows:
        heading += f"; constants were fitted to {evaluation.calibration_rows} of them"
    print_line(Text(heading, style="bold"))
    for cluster in evaluation.by_cluster:
        origin = f"fitted to {cluster.fitted_to}" if cluster.fitted_to else "fitted to no row"
        about = f"{cluster.cluster}: {cluster.about}"
        print_line(f"  {about}; stack `{cluster.stack}`; {origin}")
    console.print(_errors_table(evaluation))
    accuracy = evaluation.test_rows if evaluation.calibration_rows else evaluation.all_rows
    for line in _accuracy_lines(accuracy):
        print_line(f"  {line}")
    worst = evaluation.worst_predictions(_WORST_SHOWN)
    if worst:
        print_line("  worst predictions:")
        print_bullets(_prediction_line(prediction) for prediction in worst)
    if evaluation.skipped:
        print_line(f"  skipped: {len(evaluation.skipped)} rows (`--json` has each)")
        print_bullets(evaluation.skip_reasons)
    if evaluation.unread:
        columns = ", ".join(f"`{name}` ({rows} rows)" for name, rows in evaluation.unread.items())
        print_line(f"  columns that predictions leave out: {columns}")


def _errors_table(evaluation: TableEvaluation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("predicted", "rows"):
        table.add_column(head, no_wrap=True)
    for head in ("mean", "median", "p90", "worst", "bias", "inside", "const."):
        table.add_column(head, justify="right", no_wrap=True)
    row_sets = [("all", evaluation.all_rows)]
    if evaluation.calibration_rows:
        row_sets = [("test", evaluation.test_rows), *row_sets]
    for name, accuracy in row_sets:
        for quantity, errors in (("step", accuracy.step_time), ("memory", accuracy.memory)):
            if errors:
                table.add_row(f"{quantity}, {name}", *_error_cells(errors))
    parts = [(part.cluster, part.accuracy) for part in evaluation.by_cluster]
    for several in (parts, [*evaluation.by_precision.items()]):
        for name, accuracy in several if len(several) > 1 else ():
            if accuracy.step_time:
                table.add_row(f"  {name}", *_error_cells(accuracy.step_time))
    return table


def _error_cells(errors: RelativeErrors) -> tuple[str, ...]:
    return (
        str(errors.rows), f"{errors.mean:.1%}", f"{errors.median:.1%}", f"{errors.p90:.1%}",
        f"{errors.worst:.1%}", f"{errors.bias:+.1%}", f"{errors.interval_coverage:.0%}",
        "" if errors.baseline is None else f"{errors.baseline:.1%}",
    )  # fmt: skip


def _accuracy_lines(accuracy: Accuracy) -> Iterable[str]:
    if accuracy.ranking:
        ranking = accuracy.ranking
        yield (
            f"ranking within {ranking.groups} groups of one model and machine ({ranking.rows} "
            f"rows): rank correlation {ranking.spearman:.2f}, {ranking.ordered_share:.1%} of pairs "
            f"more than {ranking.distinct_gap:.1%} apart in measured order; the picked run takes "
            f"{ranking.picked_slowdown:.1%} longer than the fastest"
        )
    if accuracy.out_of_memory:
        memory = accuracy.out_of_memory
        yield (
            f"out of memory: {memory.foreseen} of {memory.ran_out} foreseen, {memory.false_alarms} "
            f"false alarms in {memory.ran} runs that fitted"
        )


def _prediction_line(prediction: RunPrediction) -> str:
    run, config = prediction.run, prediction.config
    plan = f"t{config.tensor:g} p{config.pipeline:g} d{config.replicas:g} micro {config.micro:g}"
    measured = run.step_seconds or 0.0
    line = (
        f"line {run.line}: {run.model} on {run.machine}, {plan}: predicted "
        f"{prediction.step_seconds:.4g} s ({prediction.low_seconds:.4g} to "
        f"{prediction.high_seconds:.4g}), measured {measured:.4g} s, "
        f"{prediction.step_seconds / measured - 1:+.1%}"
    )
    return line + (f"; {', '.join(run.assumptions)}" if run.assumptions else "")


def _evaluation_json(evaluation: TableEvaluation) -> Mapping[str, object]:
    return {
        "table": evaluation.name,
        "rows": evaluation.rows,
        "calibration_rows": evaluation.calibration_rows,
        "unread": evaluation.unread,
        "test_rows": asdict(evaluation.test_rows),
        "all_rows": asdict(evaluation.all_rows),
        "by_cluster": [asdict(cluster) for cluster in evaluation.by_cluster],
        "by_precision": {name: asdict(each) for name, each in evaluation.by_precision.items()},
        "skipped": [asdict(row) for row in evaluation.skipped],
        "predicted": [_prediction_json(prediction) for prediction in evaluation.predictions],
    }


def _prediction_json(prediction: RunPrediction) -> Mapping[str, object]:
    run = prediction.run
    return {
        "line": run.line,
        "model": run.model,
        "machine": run.machine,
        "cluster": run.cluster.name,
        "stack": run.cluster.stack,
        "calibration": prediction.is_calibration_row,
        "config": asdict(prediction.config),
        "assumptions": run.assumptions,
        "predicted_step_s": prediction.step_seconds,
        "interval_80": (prediction.low_seconds, prediction.high_seconds),
        "measured_step_s": run.step_seconds,
        "predicted_peak_bytes": prediction.peak_bytes,
        "measured_peak_bytes": run.peak_bytes,
        "fits": prediction.fits,
        "ran_out_of_memory": run.out_of_memory,
    }
