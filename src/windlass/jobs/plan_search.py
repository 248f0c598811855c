"""The search behind a plan: over grids of devices, then over smaller default batches."""

from dataclasses import dataclass, field

from windlass import planner
from windlass.cost import KeptCode
from windlass.jobs.kept_results import KeptPlan
from windlass.jobs.known_machines import Progress
from windlass.jobs.model_graph import capture_open_tensor_degrees
from windlass.jobs.objects import PlannedObjects
from windlass.planner import Findings, NothingFits, PlanningResult, resolve_defaults
from windlass.schema import DataSize, Graph, Machine, Request, ResolvedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """Searches the plan of a request."""

    request: Request
    machine: Machine
    kept_code: KeptCode
    objects: PlannedObjects
    progress: Progress | None
    data: DataSize | None
    explains: bool = True
    """Whether to say what comes next, or would help where nothing fits."""
    findings: Findings = field(default_factory=Findings)
    """What other searches of the same model and machine have found."""

    def run(self, graph: Graph) -> tuple[Graph, KeptPlan]:
        """The outcome of the search, and the graph with the shards that it took."""
        resolved = self._resolve(graph)
        graph, result = self._search(resolved, graph)
        most_sequences = None
        if isinstance(result, NothingFits):
            smaller = self._with_smaller_batch(resolved, graph)
            result, most_sequences = smaller or (result, None)
        if isinstance(result, NothingFits):
            result = result.with_advice(looks_for_changes=self.explains)
        return graph, KeptPlan(result=result, most_sequences=most_sequences)

    def _resolve(self, graph: Graph, most_sequences: int | None = None) -> ResolvedRequest:
        """The request with its defaults, the batch no larger than is given."""
        resolved, _ = resolve_defaults(
            self.request, graph, self.machine, most_sequences=most_sequences, data=self.data
        )
        return resolved

    def _with_smaller_batch(
        self, resolved: ResolvedRequest, graph: Graph
    ) -> tuple[PlanningResult | NothingFits, int] | None:
        """What is found with the largest default batch that fits; None if none decides."""
        batches = planner.smaller_batches(self.request, resolved.train.batch)
        if not batches or not self._fits(self._resolve(graph, batches[-1]), graph):
            return None
        # Which batch is usual does not hang on pins of the plan: it is the largest that fits
        # without.
        if self._fits_without_pins(resolved, graph):
            return None
        for batch in batches:
            smaller = self._resolve(graph, batch)
            attempt = self._seek(smaller, graph, every_grid=True)
            if not isinstance(attempt, NothingFits) or self._fits_without_pins(smaller, graph):
                return attempt, batch
        return None

    def _fits_without_pins(self, request: ResolvedRequest, graph: Graph) -> bool:
        """Whether a plan fits once nothing of it is pinned; no if nothing is."""
        unpinned = planner.without_pins(request)
        return unpinned != request and self._fits(unpinned, graph)

    def _fits(self, request: ResolvedRequest, graph: Graph) -> bool:
        """Whether a plan fits in any grid."""
        found = planner.seek_plan(
            request, graph, self.machine, every_grid=True, explains=False, findings=self.findings
        )
        return not isinstance(found, NothingFits)

    def _search(
        self, request: ResolvedRequest, graph: Graph
    ) -> tuple[Graph, PlanningResult | NothingFits]:
        """The result of the search, and the graph with the shards that it took.

        Capturing the shards of a grid takes seconds. So the grids that need least memory are
        captured only where nothing fits in those that are quickest.
        """
        for every_grid in (False, True):
            graph = capture_open_tensor_degrees(
                request, graph, self.machine, every_grid=every_grid, objects=self.objects,
                progress=self.progress,
            )  # fmt: skip
            if self.progress is not None:
                self.progress("searching", 0, None)
            result = self._seek(request, graph, every_grid=every_grid)
            fits = not isinstance(result, NothingFits)
            if fits or self.machine.devices == 1 or request.parallel.tensor is not None:
                break
        return graph, result

    def _seek(
        self, request: ResolvedRequest, graph: Graph, *, every_grid: bool
    ) -> PlanningResult | NothingFits:
        return planner.seek_plan(
            request, graph, self.machine, every_grid=every_grid, kept_code=self.kept_code,
            margin=self.request.margin, explains=self.explains, findings=self.findings,
        )  # fmt: skip
