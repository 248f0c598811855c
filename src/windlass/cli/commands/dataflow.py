"""`windlass dataflow`: what a layer moves to and from far memory, by how far its ops are fused."""

from pathlib import Path

from windlass import api
from windlass.cli.command_options import (
    NO_OPTIONS,
    RequestOptions,
    build_request,
    split_overrides,
)
from windlass.cli.console import ProgressBars, console, print_json, print_line, print_written
from windlass.cli.flags import AsJson, ManyNames, Shares
from windlass.errors import RequestError
from windlass.report import (
    dataflow_figure,
    dataflow_table,
    describe_dataflow,
    describe_thresholds,
    machines_curves_figure,
    machines_dataflow_table,
    section_table,
    sparsity_table,
)
from windlass.schema import DataflowReport, FlowRole


def dataflow(
    model: str | None = None,
    /,
    *overrides: str,
    on: ManyNames = (),
    role: FlowRole | None = None,
    kind: str | None = None,
    sparsity: Shares = api.SPARSITIES,
    options: RequestOptions = NO_OPTIONS,
    svg: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Show what a layer moves to and from far memory: op by op, with fused epilogues, in sections.

    A section is a run of ops done before anything goes back to far memory. All numbers are
    predicted, with ideal traffic: each op reads an operand once and writes its result once.

    For example: `windlass dataflow gpt3-13b --on sn30-rdu --role feed-forward`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.sequence=4096` or `sparsity.level=0.875`;
            `windlass keys` lists all.
        on: Machines, of which one device counts; `all` takes every device of the catalogue, and
            `here` is the one if none is given.
        role: Only this branch of a block: `attention` or `feed-forward`.
        kind: Kind of layer; the one of which the model has most if not given.
        sparsity: Shares of absent weights to compare, with commas between them.
        options: Request file.
        svg: Draw the edges and the curves to this `.svg` or `.png` file.
        as_json: Print the reports as JSON.
    """
    if svg is not None:
        api.require_drawable(svg, pages=False)
    machines, more = split_overrides(on)
    request = build_request(model, (*overrides, *more), options)
    with ProgressBars() as progress:
        reports = api.dataflow(
            request, machines, role=role, kind=kind, sparsities=sparsity,
            progress=progress,
        )  # fmt: skip
    is_one = len(reports) == 1
    if not (is_one or reports[0].curve):
        raise RequestError(
            "several machines are compared against the sparsity of a dense block, and this layer "
            "is none; name one machine by `--on`, or leave `sparsity.*` and `--kind` out"
        )
    if svg is not None:
        figure = dataflow_figure(reports[0]) if is_one else machines_curves_figure(reports)
        api.draw_figure(figure, svg)
    if as_json:
        print_json([{**report.model_dump(mode="json"), "predicted": True} for report in reports])
    elif is_one:
        _print(reports[0])
    else:
        print_line(describe_dataflow(reports[0])[0])
        console.print(machines_dataflow_table(reports))
    print_written(svg)


def _print(report: DataflowReport) -> None:
    for line in describe_dataflow(report):
        print_line(line)
    console.print(dataflow_table(report))
    console.print(section_table(report.flow("forward")))
    if report.curve:
        console.print(sparsity_table(report))
        print_line(describe_thresholds(report))
