"""The search behind a plan: over grids of devices, then over smaller default batches."""

from windlass import planner
from windlass.api.kept.kept_plans import KeptPlan
from windlass.api.machines import Progress
from windlass.api.model_graph import capture_open_tensor_degrees
from windlass.api.objects import PlannedObjects
from windlass.cost import KeptCode
from windlass.planner import PlanningResult, resolve_defaults
from windlass.schema import Graph, Machine, Request, ResolvedRequest


def search_plan(
    request: Request,
    graph: Graph,
    machine: Machine,
    kept_code: KeptCode,
    objects: PlannedObjects,
    progress: Progress | None,
) -> tuple[Graph, KeptPlan]:
    """The outcome of the search, and the graph with the shards that it took."""
    resolved, _ = resolve_defaults(request, graph, machine)
    graph, result = _search(resolved, graph, machine, kept_code, objects, progress)
    if result is None:
        for batch in _fitting_batches(request, resolved, graph, machine):
            smaller, _ = resolve_defaults(request, graph, machine, most_sequences=batch)
            attempt = planner.choose_fitting_plan(
                smaller, graph, machine, every_grid=True, kept_code=kept_code
            )
            if attempt is not None:
                return graph, KeptPlan(result=attempt, most_sequences=batch)
        # Searched once more, for advice: that takes longer than the search.
        every_grid = _opens_grids(resolved, machine)
        result = planner.choose_plan(resolved, graph, machine, every_grid=every_grid)
    return graph, KeptPlan(result=result, most_sequences=None)


def _fitting_batches(
    request: Request, resolved: ResolvedRequest, graph: Graph, machine: Machine
) -> tuple[int, ...]:
    """Smaller default batches to try, largest first; none if not even the smallest fits."""
    batches = planner.smaller_batches(request, resolved.train.batch)
    if not batches:
        return ()
    smallest, _ = resolve_defaults(request, graph, machine, most_sequences=batches[-1])
    fits = planner.choose_fitting_plan(smallest, graph, machine, every_grid=True) is not None
    return batches if fits else ()


def _search(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    kept_code: KeptCode,
    objects: PlannedObjects,
    progress: Progress | None,
) -> tuple[Graph, PlanningResult | None]:
    """The result of the search, None if nothing fits, and the graph with the shards that it took.

    Capturing the shards of a grid takes seconds. So the grids that need least memory are captured
    only where nothing fits in those that are quickest.
    """
    for every_grid in (False, True) if _opens_grids(request, machine) else (False,):
        graph = capture_open_tensor_degrees(
            request, graph, machine, every_grid=every_grid, objects=objects, progress=progress
        )
        if progress is not None:
            progress("searching", 0, None)
        result = planner.choose_fitting_plan(
            request, graph, machine, every_grid=every_grid, kept_code=kept_code
        )
        if result is not None:
            return graph, result
    return graph, None


def _opens_grids(request: ResolvedRequest, machine: Machine) -> bool:
    """Whether tensor-parallel grids are open beside the quickest ones."""
    return machine.devices > 1 and request.parallel.tensor is None
