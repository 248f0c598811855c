"""What a layer of a model moves to and from far memory, on one or several machines."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType

from windlass.answer import Answers
from windlass.api.compare import requested_names
from windlass.cost import DataflowSubject, dataflow_report
from windlass.errors import RequestError, did_you_mean
from windlass.flags import ManyNames, Shares, Watch, Written
from windlass.hardware import device_names, last_level_cache_bytes
from windlass.jobs import (
    HERE,
    NO_OPTIONS,
    Model,
    Progress,
    RequestOptions,
    build_request,
    capture,
    capture_traces,
    draw_figure,
    find_machine,
    needed_parts,
    require_drawable,
    split_overrides,
)
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
from windlass.schema import (
    DataflowReport,
    FlowRole,
    Graph,
    LayerRun,
    Machine,
    MachinePart,
    Precision,
    Request,
)

_SEQUENCE = 2048
"""Tokens of a sequence if neither the request nor the model says how many."""


class Dataflow(Answers[DataflowReport]):
    """What one kind of layer moves, a report for each machine; all of it is predicted."""

    def lines(self) -> Iterator[RenderableType]:
        """The tables of one machine, or one table of them all."""
        if len(self) > 1:
            yield describe_dataflow(self[0])[0]
            yield machines_dataflow_table(self)
            return
        (report,) = self
        yield from describe_dataflow(report)
        yield dataflow_table(report)
        yield section_table(report.flow("forward"))
        if report.curve:
            yield sparsity_table(report)
            yield describe_thresholds(report)

    def json_tree(self) -> object:
        """The reports, each with a word that it is predicted."""
        return [{**report.model_dump(mode="json"), "predicted": True} for report in self]


def dataflow(
    model: Model = None,
    /,
    *overrides: str,
    on: ManyNames = (),
    role: FlowRole | None = None,
    kind: str | None = None,
    sparsity: Shares = (0.0, 0.5, 0.75, 0.875, 0.95),
    options: RequestOptions = NO_OPTIONS,
    svg: Written = None,
    progress: Watch = None,
) -> Dataflow:
    """Show what a layer moves to and from far memory: op by op, with fused epilogues, in sections.

    A section is a run of ops done before anything goes back to far memory. All numbers are
    predicted, with ideal traffic: each op reads an operand once and writes its result once.

    For example: `windlass dataflow gpt3-13b --on sn30-rdu --role feed-forward`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.sequence=4096`, `batch.micro=4`, `precision=float32`
            or `sparsity.level=0.875`; `windlass keys` lists all.
        on: Machines, of which one device counts; `all` takes every device of the catalogue, and
            `here` is the one if none is given.
        role: Only this branch of a block: `attention` or `feed-forward`.
        kind: Kind of layer; the one of which the model has most if not given.
        sparsity: Shares of absent weights to compare, with commas between them.
        options: Request file.
        svg: Draw the edges and the curves to this `.svg` or `.png` file.
        progress: Called with how far a measurement of this machine is.

    Raises:
        WindlassError: what is wrong with the request, the model, or a machine.
    """
    if svg is not None:
        require_drawable(svg, pages=False)
    machines, more = split_overrides(on)
    request = build_request(model, (*overrides, *more), options)
    reports = Dataflow(_reports(request, machines, role, kind, sparsity, progress))
    if not (len(reports) == 1 or reports[0].curve):
        raise RequestError(
            "several machines are compared against the sparsity of a dense block, and this layer "
            "is none; name one machine by `--on`, or leave `sparsity.*` and `--kind` out"
        )
    if svg is not None:
        is_one = len(reports) == 1
        draw_figure(dataflow_figure(reports[0]) if is_one else machines_curves_figure(reports), svg)
    return reports


def _reports(
    request: Request,
    machines: Sequence[str],
    role: FlowRole | None,
    kind: str | None,
    sparsities: Sequence[float],
    progress: Progress | None,
) -> Iterator[DataflowReport]:
    for key in ("stack", "memory"):
        if getattr(request, key) is not None:
            raise RequestError(
                f"`{key}` = {getattr(request, key)} is asked for, but what an op moves depends on "
                "neither software nor budget; leave it out"
            )
    for sparsity in sparsities:
        if not 0 <= sparsity < 1:
            raise RequestError(
                f"sparsity {sparsity:g} is no share of absent weights; it must be at least 0 and "
                "less than 1, such as 0.875"
            )
    names = requested_names(machines or (request.machine,), device_names())
    # Ops are those of the dense model: a sparse one may run several of them as one.
    dense = request.model_copy(update={"sparsity": None})
    graph = capture(dense.model_identity)
    needs = needed_parts(dense, graph)
    found = [_machine(name, needs, progress) for name in names]
    subjects: dict[Precision, DataflowSubject] = {}
    for machine in found:
        precision = _precision(request, machine)
        if precision not in subjects:
            subject = _subject(dense, graph, precision, role, kind)
            if request.sparsity is not None:
                kept = _kept_shares(capture(request.model_identity), graph, subject.kind)
                subject = replace(subject, kept=kept)
            subjects[precision] = subject
        levels = tuple(dict.fromkeys(sparsities))
        yield dataflow_report(subjects[precision], machine, levels)


def _machine(name: str, needs: Collection[MachinePart], progress: Progress | None) -> Machine:
    machine = find_machine(name, progress=progress, needs=needs)
    if name != HERE or machine.device.on_chip_bytes is not None:
        return machine
    device = machine.device.model_copy(update={"on_chip_bytes": last_level_cache_bytes()})
    return machine.model_copy(update={"device": device})


def _precision(request: Request, machine: Machine) -> Precision:
    if request.precision not in (None, "float32", "bfloat16"):
        raise RequestError(
            f"`precision` = {request.precision}, but layers are counted in float32 or bfloat16; "
            "choose one of these"
        )
    if request.precision is not None:
        return request.precision
    return machine.device.half_precision


def _subject(
    request: Request, graph: Graph, precision: Precision, role: FlowRole | None, kind: str | None
) -> DataflowSubject:
    run = _layer_run(graph, kind)
    sequence = request.train.sequence or graph.max_sequence or _SEQUENCE
    if graph.max_sequence is not None and sequence > graph.max_sequence:
        raise RequestError(
            f"`train.sequence` = {sequence}, but `{graph.name}` takes at most {graph.max_sequence} "
            "tokens; shorten it or raise `model.sequence`"
        )
    outer = (graph.layer_runs[0].kind, graph.layer_runs[-1].kind)
    return DataflowSubject(
        model=graph.name,
        kind=run.kind,
        layers=sum(each.count for each in graph.layer_runs if each.kind == run.kind),
        traced=capture_traces(request.model_identity, precision)[run.kind],
        role=role,
        size=(request.batch.micro or 1, sequence),
        precision=precision,
        can_be_sparse=run.kind not in outer,
    )


def _layer_run(graph: Graph, kind: str | None) -> LayerRun:
    """The largest run of layers of a kind, or of any kind."""
    runs = [run for run in graph.layer_runs if kind in (None, run.kind)]
    if not runs:
        kinds = list(dict.fromkeys(run.kind for run in graph.layer_runs))
        raise RequestError(
            f"`{graph.name}` has no layers of kind `{kind}`{did_you_mean(kind or '', kinds)}; "
            f"its kinds are {', '.join(kinds)}"
        )
    return max(runs, key=lambda run: run.count)


def _kept_shares(sparse: Graph, dense: Graph, kind: str) -> dict[str, float]:
    """Kept share of each weight of a kind of layer of which only kept blocks are stored, by name.

    A weight whose absent elements are stored as zeros, as in an unstructured pattern, moves whole.
    """
    counts = {each.name: each.count for each in sparse.kinds[kind].parameters}
    return {
        each.name: counts[values] / each.count
        for each in dense.kinds[kind].parameters
        if (values := f"{each.name.rpartition('.')[0]}.values") in counts
        and each.name.endswith(".weight")
    }
