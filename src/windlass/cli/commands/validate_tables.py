"""`windlass validate TABLE.csv`: prints how far predictions lie from published runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table

from windlass.cli.console import console, print_bullets, print_json, print_line
from windlass.validation.evaluate_table import Accuracy, TableEvaluation
from windlass.validation.metrics import RelativeErrors
from windlass.validation.predict_run import RunPrediction

_WORST = 5


def show_evaluated(judged: Sequence[TableEvaluation], *, as_json: bool) -> None:
    """Prints the accuracy of each table, or all rows as values for another program."""
    if as_json:
        print_json([_tree(one) for one in judged])
        return
    for one in judged:
        _show(one)
    print_line("bias: mean of signed errors, + predicted too long; inside: in 80 % intervals")
    print_line("const.: mean error of one fitted constant, time = constant x FLOP / devices")


def _show(judged: TableEvaluation) -> None:
    said = f"{judged.name}: {judged.rows} rows, {len(judged.predictions)} predicted"
    if judged.calibration_rows:
        said += f", {judged.calibration_rows} of them constants were fitted from"
    print_line(f"[bold]{said}[/bold]")
    for part in judged.by_stack:
        told = {"fitted": "fitted from", "borrowed": "borrowed from", "prior": "fitted from"}
        print_line(f"  {part.stack}: {part.about}; {told[part.provenance]} {part.fitted_from}")
    console.print(_errors_table(judged))
    for line in _lines(judged.test_rows if judged.calibration_rows else judged.all_rows):
        print_line(f"  {line}")
    if judged.worst_predictions(1):
        print_line("  furthest off:")
        print_bullets(_row_line(one) for one in judged.worst_predictions(_WORST))
    if judged.skipped:
        print_line(f"  not expressed: {len(judged.skipped)} rows (`--json` has each)")
        print_bullets(judged.skip_reasons)
    if judged.unknown_columns:
        print_line(f"  columns that nothing reads: {', '.join(judged.unknown_columns)}")


def _errors_table(judged: TableEvaluation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("predicted", "rows"):
        table.add_column(head, no_wrap=True)
    for head in ("mean", "median", "p90", "worst", "bias", "inside", "const."):
        table.add_column(head, justify="right", no_wrap=True)
    sets = [("all", judged.all_rows)]
    if judged.calibration_rows:
        sets = [("test", judged.test_rows), *sets]
    for name, score in sets:
        for what, errors in (("step", score.step_time), ("memory", score.memory)):
            if errors:
                table.add_row(f"{what}, {name}", *_cells(errors))
    if len(judged.by_stack) > 1:
        for part in judged.by_stack:
            if part.score.step_time:
                table.add_row(f"  {part.stack}", *_cells(part.score.step_time))
    return table


def _cells(errors: RelativeErrors) -> tuple[str, ...]:
    return (
        str(errors.rows), f"{errors.mean:.1%}", f"{errors.median:.1%}", f"{errors.p90:.1%}",
        f"{errors.worst:.1%}", f"{errors.bias:+.1%}", f"{errors.interval_coverage:.0%}",
        "" if errors.baseline is None else f"{errors.baseline:.1%}",
    )  # fmt: skip


def _lines(score: Accuracy) -> Iterable[str]:
    if score.ranking:
        ranks = score.ranking
        yield (
            f"order within {ranks.groups} groups of one model and machine ({ranks.rows} rows): "
            f"rank correlation {ranks.spearman:.2f}, {ranks.ordered_share:.1%} of pairs more than "
            f"{ranks.distinct_gap:.1%} apart ordered as measured, the picked run {ranks.picked_slowdown:.1%} above "
            "the fastest"
        )
    if score.out_of_memory:
        calls = score.out_of_memory
        yield (
            f"out of memory: {calls.foreseen} of {calls.ran_out} called, {calls.false_alarms} of "
            f"{calls.ran} runs that fitted called falsely"
        )


def _row_line(one: RunPrediction) -> str:
    run, cut = one.run, one.config
    plan = f"t{cut.tensor:g} p{cut.pipeline:g} d{cut.replicas:g} micro {cut.micro:g}"
    measured = run.step_seconds or 0.0
    largest = max(one.by_term, key=lambda name: one.by_term[name])
    said = (
        f"line {run.line}: {run.model} on {run.machine}, {plan}: predicted "
        f"{one.step_seconds:.4g} s ({one.low_seconds:.4g} to {one.high_seconds:.4g}), measured "
        f"{measured:.4g} s, {one.step_seconds / measured - 1:+.1%}; most goes into {largest}"
    )
    return said + (f"; {', '.join(run.assumptions)}" if run.assumptions else "")


def _tree(judged: TableEvaluation) -> Mapping[str, object]:
    return {
        "table": judged.name,
        "rows": judged.rows,
        "calibration_rows": judged.calibration_rows,
        "unknown_columns": judged.unknown_columns,
        "test": asdict(judged.test_rows),
        "every": asdict(judged.all_rows),
        "parts": [asdict(part) for part in judged.by_stack],
        "refused": [asdict(one) for one in judged.skipped],
        "predicted": [_row(one) for one in judged.predictions],
    }


def _row(one: RunPrediction) -> Mapping[str, object]:
    return {
        "line": one.run.line,
        "model": one.run.model,
        "machine": one.run.machine,
        "stack": one.run.stack,
        "calibration": one.is_calibration_row,
        "provenance": one.calibration.provenance,
        "cut": asdict(one.config),
        "taken": one.run.assumptions,
        "predicted_step_s": one.step_seconds,
        "interval_80": (one.low_seconds, one.high_seconds),
        "by_term": dict(one.by_term),
        "measured_step_s": one.run.step_seconds,
        "predicted_peak_bytes": one.peak_bytes,
        "measured_peak_bytes": one.run.peak_bytes,
        "fits": one.fits,
        "ran_out_of_memory": one.run.out_of_memory,
    }
