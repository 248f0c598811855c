"""Tables that compare one request on many machines, or with many global batch sizes."""

from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import parallel_degrees
from windlass.report.terminal.tables import titled_table
from windlass.schema import MachineForecast, SmallestMachine
from windlass.units import format_count, format_seconds


def machine_comparison_table(forecasts: Sequence[MachineForecast]) -> RenderableType:
    """One row for each machine on which a plan fits, in the given order."""
    table = _table("on each machine, all numbers predicted", "machine", "devices", "plan")
    for column in ("step", "tokens/s", "MFU"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by")
    for forecast in forecasts:
        if forecast.plan is not None and forecast.prediction is not None:
            table.add_row(
                Text(forecast.machine),
                f"{forecast.plan.parallel.devices}/{forecast.devices}",
                parallel_degrees(forecast.plan),
                *_numbers(forecast),
                _slowest_term(forecast),
            )
    return table


def batch_comparison_table(forecasts: Sequence[MachineForecast]) -> RenderableType:
    """One row for each global batch: its factors, and its speed relative to the fastest."""
    table = _table(
        "global batch = b × DP, b = accumulation × micro-batch; all numbers predicted",
        "batch", "b × DP", "b", "plan",
    )  # fmt: skip
    for column in ("step", "tokens/s", "MFU", "of best"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by")
    fastest = max((forecast.tokens_per_second for forecast in forecasts), default=0.0)
    for forecast in forecasts:
        if forecast.plan is None:
            table.add_row(str(forecast.global_batch), *["–"] * 8)
            continue
        batch = forecast.plan.batch
        table.add_row(
            str(forecast.global_batch),
            f"{batch.sequences_per_replica}×{forecast.plan.parallel.data}",
            f"{batch.accumulation}×{batch.micro}",
            parallel_degrees(forecast.plan),
            *_numbers(forecast),
            f"{100 * forecast.tokens_per_second / fastest:.0f} %",
            _slowest_term(forecast),
        )
    return table


def smallest_machine_table(rows: Sequence[SmallestMachine]) -> RenderableType:
    """One row for each model and family of machines."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        title="smallest machine that fits, all numbers predicted", title_justify="left",
        title_style="bold",
    )  # fmt: skip
    table.add_column("model", no_wrap=True)
    table.add_column("machine", no_wrap=True)
    table.add_column("devices", justify="right")
    table.add_column("parallelism", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        name = f"{row.model} ({format_count(row.parameters)})" if row.model != previous else ""
        previous = row.model
        table.add_row(
            Text(name),
            Text(row.machine or f"no {row.family}"),
            str(row.devices or "–"),
            row.parallelism or "–",
            format_seconds(row.prediction.step_seconds) if row.prediction else "–",
        )
    return table


def infeasible_lines(forecasts: Sequence[MachineForecast]) -> tuple[str, ...]:
    """One line for each forecast without a plan, with the reason."""
    return tuple(
        f"{forecast.machine}, {forecast.global_batch} sequences: {forecast.infeasible_reason}"
        for forecast in forecasts
        if forecast.plan is None
    )


def _table(title: str, *columns: str) -> Table:
    return titled_table(title, *columns, stays_whole=lambda column: column != "plan")


def _numbers(forecast: MachineForecast) -> tuple[str, str, str]:
    """Step time, tokens per second and MFU; dashes without a plan."""
    if forecast.prediction is None:
        return "–", "–", "–"
    return (
        format_seconds(forecast.prediction.step_seconds),
        format_count(round(forecast.tokens_per_second)),
        f"{100 * forecast.prediction.mfu:.0f} %",
    )


def _slowest_term(forecast: MachineForecast) -> str:
    """`45 % matmul`, `30 % comm`: the first word of the term, short for a narrow column."""
    term, share = forecast.slowest_term
    return f"{100 * share:.0f} % {term.split()[0].replace('communication', 'comm')}"
