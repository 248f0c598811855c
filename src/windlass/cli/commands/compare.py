"""`windlass machines compare` and `windlass batch`: one model on many machines or batch sizes."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import RenderableType

from windlass import api
from windlass.cli.command_options import (
    NO_OPTIONS,
    RequestOptions,
    build_request,
    require_machine_names,
    split_overrides,
)
from windlass.cli.console import (
    ProgressBars,
    console,
    print_bullets,
    print_json,
    print_line,
    print_written,
)
from windlass.cli.flags import AsJson, ManyNames, ManySizes
from windlass.report import (
    batch_comparison_figure,
    batch_comparison_table,
    infeasible_lines,
    machine_comparison_figure,
    machine_comparison_table,
)
from windlass.schema import MachineForecast


def compare(
    model: str | None = None,
    /,
    *overrides: str,
    on: ManyNames = (api.ALL_MACHINES,),
    options: RequestOptions = NO_OPTIONS,
    picture: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Plan one model for many machines: where it fits, how fast it is, and what limits it.

    The exit code is 1 if the model fits on none of them.

    For example: `windlass machines compare gpt3-13b --on h100 dgx-h100 train.batch=256`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.batch=256`; `windlass keys` lists all.
        on: Machines; `all` takes every one of the catalogue, and of each family the smallest.
        options: Device memory budget and request file.
        picture: Draw the comparison to this `.svg` or `.png` file.
        as_json: Print the plan and prediction for each machine as JSON.
    """
    if picture is not None:
        api.require_drawable(picture, pages=False)
    machines, more = split_overrides(on)
    require_machine_names(machines)
    request = build_request(model, (*overrides, *more), options)
    with ProgressBars() as progress:
        forecasts = api.compare_machines(request, machines, progress=progress)
    heading = f"{request.model.name}, {forecasts[0].global_batch} sequences a step"
    if picture is not None:
        api.draw_figure(machine_comparison_figure(forecasts, heading), picture)
    if not as_json:
        print_line(heading)
    print_written(picture)
    _print(forecasts, machine_comparison_table, as_json=as_json)


def batch(
    model: str | None = None,
    /,
    *overrides: str,
    on: str | None = None,
    sizes: ManySizes = api.BATCH_SIZES,
    options: RequestOptions = NO_OPTIONS,
    picture: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Compare global batch sizes: how each divides into micro-batches, and how fast it is.

    The exit code is 1 if none has a plan.

    For example: `windlass batch gpt3-13b --on dgx-h100 --sizes 64,256,1024`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `parallel.data=4`; `windlass keys` lists all.
        on: The machine (`windlass machines` lists them); `here` if not given.
        sizes: Global batches in sequences.
        options: Device memory budget and request file.
        picture: Draw the comparison to this `.svg` or `.png` file.
        as_json: Print the plan and prediction for each batch size as JSON.
    """
    for size in sizes:
        build_request(None, (f"train.batch={size}",), NO_OPTIONS)
    if picture is not None:
        api.require_drawable(picture, pages=False)
    request = build_request(model, overrides, options, machine=on)
    with ProgressBars() as progress:
        forecasts = tuple(api.compare_batches(request, sizes, progress=progress))
    if picture is not None:
        heading = f"{request.model.name} on {request.machine}"
        api.draw_figure(batch_comparison_figure(forecasts, heading), picture)
    print_written(picture)
    _print(forecasts, batch_comparison_table, as_json=as_json)


def _print(
    forecasts: Sequence[MachineForecast],
    table: Callable[[Sequence[MachineForecast]], RenderableType],
    *,
    as_json: bool,
) -> None:
    """Prints the forecasts, and the reason wherever there is no plan."""
    if as_json:
        print_json([_json_tree(forecast) for forecast in forecasts])
    else:
        console.print(table(forecasts))
        lines = infeasible_lines(forecasts)
        if lines:
            print_line("no plan")
            print_bullets(lines)
    if not any(forecast.plan for forecast in forecasts):
        sys.exit(1)


def _json_tree(forecast: MachineForecast) -> dict[str, object]:
    return {
        **forecast.model_dump(mode="json"),
        "predicted": True,
        "tokens_per_second": forecast.tokens_per_second,
    }
