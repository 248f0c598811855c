"""`windlass compare` and `windlass batch`: one model on many machines, or with many batches."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType

from windlass import api
from windlass.cli.console import ProgressBars, console, print_bullets, print_json, print_line
from windlass.cli.options import AsJson, build_request, require_machine_names, split_overrides
from windlass.errors import RequestError
from windlass.report.figures.comparison import batch_comparison_figure, machine_comparison_figure
from windlass.report.terminal.comparison_tables import (
    batch_comparison_table,
    infeasible_lines,
    machine_comparison_table,
)
from windlass.schema.comparison import MachineForecast

SIZES = tuple(2**power for power in range(3, 13))
"""Global batches that are tried where none is named."""

Table = Callable[[Sequence[MachineForecast]], RenderableType]
"""Draws offers for a terminal."""


def compare(
    model: str | None = None,
    *overrides: str,
    on: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (api.ALL_MACHINES,),
    memory: str | None = None,
    file: Path | None = None,
    picture: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Plan one model for many machines: where it fits, how fast, and what bounds it.

    The exit code is 1 if it fits nowhere.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `train.batch=256`.
        on: machines; `all` for every one of the catalogue, families by their smallest.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        picture: draw the answer to this `.svg` or `.png` file.
        as_json: print plan and prediction of each as JSON.
    """
    if picture is not None:
        api.require_drawable(picture, pages=False)
    machines, more = split_overrides(on)
    require_machine_names(machines)
    request = build_request(model, (*overrides, *more), memory=memory, file=file)
    with ProgressBars() as progress:
        offers = api.compare_machines(request, machines, progress=progress)
    if picture is not None:
        heading = f"{request.model.name}, {request.train.batch} sequences a step"
        api.draw_figure(machine_comparison_figure(offers, heading), picture)
    _tell(offers, machine_comparison_table, as_json=as_json)


def batch(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = SIZES,
    memory: str | None = None,
    file: Path | None = None,
    picture: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Tell what each global batch costs: how it is made up, and how fast it is.

    The exit code is 1 if none has a plan.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `parallel.data=4`.
        on: the machine; `here` if not given.
        sizes: global batches in sequences.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        picture: draw the answer to this `.svg` or `.png` file.
        as_json: print plan and prediction of each as JSON.
    """
    small = [size for size in sizes if size < 1]
    if small:
        raise RequestError(f"`--sizes`: {small[0]} is no number of sequences; write 1 or more")
    if picture is not None:
        api.require_drawable(picture, pages=False)
    request = build_request(model, overrides, on=on, memory=memory, file=file)
    with ProgressBars() as progress:
        offers = tuple(api.compare_batches(request, sizes, progress=progress))
    if picture is not None:
        heading = f"{request.model.name} on {request.machine}"
        api.draw_figure(batch_comparison_figure(offers, heading), picture)
    _tell(offers, batch_comparison_table, as_json=as_json)


def _tell(offers: Sequence[MachineForecast], table: Table, *, as_json: bool) -> None:
    """Prints what was found, and why there is no plan where there is none."""
    if as_json:
        print_json([_tree(offer) for offer in offers])
    else:
        console.print(table(offers))
        lines = infeasible_lines(offers)
        if lines:
            print_line("no plan")
            print_bullets(lines)
    if not any(offer.plan for offer in offers):
        sys.exit(1)


def _tree(offer: MachineForecast) -> dict[str, object]:
    return {
        **offer.model_dump(mode="json"),
        "predicted": True,
        "tokens_per_second": offer.tokens_per_second,
    }
