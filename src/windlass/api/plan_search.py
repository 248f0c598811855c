"""The search behind a plan: over grids of devices, then over smaller default batches."""

from windlass import planner
from windlass.api.kept.kept_plans import KeptPlan
from windlass.api.machines import Progress
from windlass.api.model_graph import capture_open_tensor_degrees
from windlass.api.objects import PlannedObjects
from windlass.cost import KeptCode
from windlass.planner import NothingFits, PlanningResult, resolve_defaults
from windlass.schema import DataSize, Graph, Machine, Request, ResolvedRequest


def search_plan(
    request: Request,
    graph: Graph,
    machine: Machine,
    kept_code: KeptCode,
    objects: PlannedObjects,
    progress: Progress | None,
    data: DataSize | None,
    *,
    explains: bool = True,
) -> tuple[Graph, KeptPlan]:
    """The outcome of the search, and the graph with the shards that it took.

    What comes next, and what would help where nothing fits, is looked for only if it is wanted.
    """
    resolved, _ = resolve_defaults(request, graph, machine, data=data)
    graph, result = _search(resolved, graph, machine, kept_code, objects, progress, explains)
    most_sequences = None
    if isinstance(result, NothingFits):
        smaller = _with_smaller_batch(request, resolved, graph, machine, kept_code, data, explains)
        result, most_sequences = smaller or (result, None)
    if isinstance(result, NothingFits):
        result = result.with_advice(looks_for_changes=explains)
    return graph, KeptPlan(result=result, most_sequences=most_sequences)


def _with_smaller_batch(
    request: Request,
    resolved: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    kept_code: KeptCode,
    data: DataSize | None,
    explains: bool,
) -> tuple[PlanningResult | NothingFits, int] | None:
    """What is found with the largest default batch that fits; None if no smaller one decides."""
    batches = _fitting_batches(request, resolved, graph, machine, data)
    # Which batch is usual does not hang on pins of the plan: it is the largest that fits without.
    if not batches or _fits_without_pins(resolved, graph, machine):
        return None
    for batch in batches:
        smaller, _ = resolve_defaults(request, graph, machine, most_sequences=batch, data=data)
        attempt = planner.seek_plan(
            smaller, graph, machine, every_grid=True, kept_code=kept_code, margin=request.margin,
            explains=explains,
        )  # fmt: skip
        if not isinstance(attempt, NothingFits) or _fits_without_pins(smaller, graph, machine):
            return attempt, batch
    return None


def _fits_without_pins(request: ResolvedRequest, graph: Graph, machine: Machine) -> bool:
    """Whether a plan fits once nothing of it is pinned; no if nothing is."""
    unpinned = planner.without_pins(request)
    if unpinned == request:
        return False
    return not isinstance(_fit(unpinned, graph, machine), NothingFits)


def _fitting_batches(
    request: Request,
    resolved: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    data: DataSize | None,
) -> tuple[int, ...]:
    """Smaller default batches to try, largest first; none if not even the smallest fits."""
    batches = planner.smaller_batches(request, resolved.train.batch)
    if not batches:
        return ()
    smallest, _ = resolve_defaults(request, graph, machine, most_sequences=batches[-1], data=data)
    found = _fit(smallest, graph, machine)
    return () if isinstance(found, NothingFits) else batches


def _fit(request: ResolvedRequest, graph: Graph, machine: Machine) -> PlanningResult | NothingFits:
    """The proved fastest plan in any grid, if one fits."""
    return planner.seek_plan(request, graph, machine, every_grid=True, explains=False)


def _search(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    kept_code: KeptCode,
    objects: PlannedObjects,
    progress: Progress | None,
    explains: bool,
) -> tuple[Graph, PlanningResult | NothingFits]:
    """The result of the search, and the graph with the shards that it took.

    Capturing the shards of a grid takes seconds. So the grids that need least memory are captured
    only where nothing fits in those that are quickest.
    """
    for every_grid in (False, True):
        graph = capture_open_tensor_degrees(
            request, graph, machine, every_grid=every_grid, objects=objects, progress=progress
        )
        if progress is not None:
            progress("searching", 0, None)
        result = planner.seek_plan(
            request, graph, machine, every_grid=every_grid, kept_code=kept_code,
            margin=request.margin, explains=explains,
        )  # fmt: skip
        fits = not isinstance(result, NothingFits)
        if fits or machine.devices == 1 or request.parallel.tensor is not None:
            break
    return graph, result
