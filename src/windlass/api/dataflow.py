"""What a layer of a model moves to and from far memory, on one or several machines."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from windlass.api.compare import requested_names
from windlass.api.machines import HERE, Progress, find_machine, needed_parts
from windlass.api.model_graph import capture, capture_traces
from windlass.cost import DataflowSubject, dataflow_report
from windlass.errors import RequestError, did_you_mean
from windlass.hardware import device_names, last_level_cache_bytes
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

SPARSITIES = (0.0, 0.5, 0.75, 0.875, 0.95)
"""Shares of absent weights that a report compares."""

_SEQUENCE = 2048
"""Tokens of a sequence if neither the request nor the model says how many."""


def dataflow(
    request: Request,
    machines: Sequence[str] = (),
    *,
    role: FlowRole | None = None,
    kind: str | None = None,
    sparsities: Sequence[float] = SPARSITIES,
    progress: Progress | None = None,
) -> tuple[DataflowReport, ...]:
    """What one kind of layer moves on one device of each machine, fused to three degrees.

    All of it is predicted.

    Args:
        request: the model with its sparsity, `train.sequence` (the model's longest if not given),
            `batch.micro` (1) and `precision` (16 bits where the device computes in them).
        machines: names, or `ALL_MACHINES` for every device of the catalogue; the request's own
            machine if empty.
        role: a branch of a block; None means the whole layer.
        kind: the kind of layer; None means the one of which there are most.
        sparsities: shares of absent weights to compare, for a model that is dense.
        progress: called with how far a measurement of this machine is.

    Raises:
        WindlassError: what is wrong with the request, the model, or a machine.
    """
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
    reports = []
    for machine in found:
        precision = _precision(request, machine)
        if precision not in subjects:
            subject = _subject(dense, graph, precision, role, kind)
            if request.sparsity is not None:
                kept = _kept_shares(capture(request.model_identity), graph, subject.kind)
                subject = replace(subject, kept=kept)
            subjects[precision] = subject
        levels = tuple(dict.fromkeys(sparsities))
        reports.append(dataflow_report(subjects[precision], machine, levels))
    return tuple(reports)


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
    """The largest run of layers of a kind, or of any kind.

    Raises:
        RequestError: the model has no such kind.
    """
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
