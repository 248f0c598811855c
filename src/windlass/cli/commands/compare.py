"""`windlass compare` and `windlass batch`: one model on many machines, or with many batches."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType

from windlass import api
from windlass.cli.console import Bars, console, print_json, print_line, print_points
from windlass.cli.options import AsJson, apart, request_of, require_named
from windlass.errors import RequestError
from windlass.report.figures.comparison import batches_picture, machines_picture
from windlass.report.terminal.comparison_tables import (
    batches_table,
    machines_offers_table,
    refused_lines,
)
from windlass.schema.comparison import Offer

SIZES = tuple(2**power for power in range(3, 13))
"""Global batches that are tried where none is named."""

Table = Callable[[Sequence[Offer]], RenderableType]
"""Draws offers for a terminal."""


def compare(
    model: str | None = None,
    *overrides: str,
    on: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (api.ALL,),
    near: str | None = None,
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
    machines, more = apart(on)
    require_named(machines)
    request = request_of(model, (*overrides, *more), near=near, file=file)
    with Bars() as progress:
        offers = api.compared(request, machines, progress=progress)
    if picture is not None:
        heading = f"{request.model.name}, {request.train.batch} sequences a step"
        api.draw_alone(machines_picture(offers, heading), picture)
    _tell(offers, machines_offers_table, as_json=as_json)


def batch(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = SIZES,
    near: str | None = None,
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
    request = request_of(model, overrides, on=on, near=near, file=file)
    with Bars() as progress:
        offers = tuple(api.batches(request, sizes, progress=progress))
    if picture is not None:
        heading = f"{request.model.name} on {request.machine}"
        api.draw_alone(batches_picture(offers, heading), picture)
    _tell(offers, batches_table, as_json=as_json)


def _tell(offers: Sequence[Offer], table: Table, *, as_json: bool) -> None:
    """Prints what was found, and why there is no plan where there is none."""
    if as_json:
        print_json([_tree(offer) for offer in offers])
    else:
        console.print(table(offers))
        lines = refused_lines(offers)
        if lines:
            print_line("no plan")
            print_points(lines)
    if not any(offer.plan for offer in offers):
        sys.exit(1)


def _tree(offer: Offer) -> dict[str, object]:
    return {
        **offer.model_dump(mode="json"),
        "predicted": True,
        "tokens_per_second": offer.tokens_per_second,
    }
