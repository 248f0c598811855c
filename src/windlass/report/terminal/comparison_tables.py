"""Offers: one request on many machines, or with many global batches, as tables."""

from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from windlass.report.formatting import parallel_degrees
from windlass.schema.comparison import MachineForecast, SmallestMachine
from windlass.units import format_count, format_seconds


def machine_comparison_table(offers: Sequence[MachineForecast]) -> RenderableType:
    """A line for each machine on which a plan fits, in the order given."""
    table = _table("on each machine, all numbers predicted", "machine", "devices", "plan")
    for column in ("step", "tokens/s", "MFU"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("mostly")
    for offer in offers:
        if offer.plan is not None and offer.prediction is not None:
            table.add_row(
                Text(offer.machine),
                f"{offer.plan.parallel.devices}/{offer.devices}",
                parallel_degrees(offer.plan),
                *_figures(offer),
                _bound(offer),
            )
    return table


def batch_comparison_table(offers: Sequence[MachineForecast]) -> RenderableType:
    """A line for each global batch: how it is made up, and its speed beside the fastest one's."""
    table = _table("global batch = b × r, all numbers predicted", "batch", "b × r", "b", "plan")
    for column in ("step", "tokens/s", "MFU", "of best"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("mostly")
    fastest = max((offer.tokens_per_second for offer in offers), default=0.0)
    for offer in offers:
        if offer.plan is None:
            table.add_row(str(offer.global_batch), *["–"] * 8)
            continue
        batch = offer.plan.batch
        table.add_row(
            str(offer.global_batch),
            f"{batch.sequences_per_replica}×{offer.plan.parallel.data}",
            f"{batch.accumulation}×{batch.micro}",
            parallel_degrees(offer.plan),
            *_figures(offer),
            f"{100 * offer.tokens_per_second / fastest:.0f} %",
            _bound(offer),
        )
    return table


def smallest_machine_table(rows: Sequence[SmallestMachine]) -> RenderableType:
    """A line for each model and family."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        title="smallest machine that fits, all numbers predicted", title_justify="left",
        title_style="bold",
    )  # fmt: skip
    table.add_column("model", no_wrap=True)
    table.add_column("machine", no_wrap=True)
    table.add_column("devices", justify="right")
    table.add_column("cut", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    last = ""
    for row in rows:
        name = f"{row.model} ({format_count(row.parameters)})" if row.model != last else ""
        last = row.model
        table.add_row(
            Text(name),
            Text(row.machine or f"no {row.family}"),
            str(row.devices or "–"),
            row.parallelism or "–",
            format_seconds(row.prediction.step_seconds) if row.prediction else "–",
        )
    return table


def infeasible_lines(offers: Sequence[MachineForecast]) -> tuple[str, ...]:
    """What has no plan, and why."""
    return tuple(
        f"{offer.machine}, {offer.global_batch} sequences: {offer.infeasible_reason}"
        for offer in offers
        if offer.plan is None
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, no_wrap=column != "plan", overflow="fold")
    return table


def _figures(offer: MachineForecast) -> tuple[str, str, str]:
    """Step, tokens a second and MFU of an offer with a plan."""
    if offer.prediction is None:
        return "–", "–", "–"
    return (
        format_seconds(offer.prediction.step_seconds),
        format_count(round(offer.tokens_per_second)),
        f"{100 * offer.prediction.mfu:.0f} %",
    )


def _bound(offer: MachineForecast) -> str:
    """`45 % matmul`: one word of the term, in a narrow column."""
    term, share = offer.slowest_term
    return f"{100 * share:.0f} % {term.split()[0]}"
