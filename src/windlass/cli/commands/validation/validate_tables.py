"""`windlass validate TABLE.csv`: how far predictions are from published runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table
from rich.text import Text

from windlass.cli.console import console, print_bullets, print_json, print_line
from windlass.validation import (
    Accuracy,
    RelativeErrors,
    RunPrediction,
    TableEvaluation,
)

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
