"""Plans for the parallel degrees that the request names."""

from collections.abc import Iterator
from itertools import pairwise

from windlass.errors import InputErrors
from windlass.planner.space.options import base_plan, open_plans
from windlass.planner.space.stage_partition import stage_partition
from windlass.program import plan_errors
from windlass.schema import (
    Graph,
    Machine,
    Offload,
    Parallelism,
    Plan,
    Request,
    ResolvedRequest,
    ShardingDegrees,
    Stage,
)


def pinned_parallelism(request: Request) -> Parallelism:
    """The parallelism that a request names; degrees that it leaves open are 1."""
    named, layers = request.parallel, request.recompute_layers
    stages = len(layers) if isinstance(layers, tuple) else 1
    return Parallelism(
        pipeline=named.pipeline or stages,
        tensor=named.tensor or 1,
        data=named.data or 1,
        context=named.context if (named.context or 1) > 1 else None,
    )


def with_whole_parallelism(request: ResolvedRequest) -> ResolvedRequest:
    """The request with all its parallel degrees named, if it names more than one device."""
    parallel = pinned_parallelism(request)
    if parallel.devices == 1:
        return request
    whole = request.parallel.model_copy(
        update={"pipeline": parallel.pipeline, "tensor": parallel.tensor, "data": parallel.data}
    )
    return request.model_copy(update={"parallel": whole})


def pinned_plans(request: ResolvedRequest, graph: Graph, machine: Machine) -> tuple[Plan, ...]:
    """Every plan with the request's parallelism that it leaves open.

    Raises:
        InputErrors: everything that is wrong with the parallelism for this graph and machine.
    """
    parallel, virtual_stages = pinned_parallelism(request), request.parallel.virtual_stages or 1
    faults = tuple(_parallelism_faults(request, parallel, virtual_stages, graph))
    if faults:
        raise InputErrors(faults)
    stages = stage_partition(graph, parallel.pipeline * virtual_stages, request.train.sequence)
    first = base_plan(_replica_request(request, parallel.data), graph, machine).model_copy(
        update={
            "parallel": parallel.model_copy(
                update={
                    "virtual_stages": virtual_stages,
                    "schedule": request.parallel.schedule
                    or ("interleaved" if virtual_stages > 1 else "1f1b"),
                }
            ),
            "sharding": ShardingDegrees(
                parameters=request.sharding.parameters or 1,
                optimizer=request.sharding.optimizer or 1,
            ),
            "stages": tuple(Stage(phases=(bounds,)) for bounds in stages),
        }
    )
    if request.phases and request.phases > 1:
        first = _in_phases(first, request.phases, machine)
    plans = open_plans(first, _replica_request(request, parallel.data), graph, machine)
    errors = [plan_errors(plan, graph, machine) for plan in plans]
    legal = tuple(plan for plan, faulty in zip(plans, errors, strict=True) if not faulty)
    if not legal:
        raise InputErrors(tuple(dict.fromkeys(fault for faulty in errors for fault in faulty)))
    return legal


def _in_phases(plan: Plan, phases: int, machine: Machine) -> Plan:
    """Each stage in this many phases, as even as its layers allow, offloaded to the first tier."""
    tier = next((tier.name for tier in machine.device.tiers[1:] if tier.read), None)
    if tier is None:
        raise InputErrors((f"`phases` = {phases}, but `{machine.name}` has no offload tier",))
    stages = tuple(
        Stage(phases=tuple(_even_ranges(stage.first_layer, stage.end_layer, phases)))
        for stage in plan.stages
    )
    offload = Offload(parameters=tier, gradients=tier, optimizer=tier)
    return plan.model_copy(update={"offload": offload, "stages": stages})


def _even_ranges(first: int, last: int, count: int) -> Iterator[tuple[int, int]]:
    """Ranges of layers from `first` up to `last`, as even as possible."""
    count = min(count, last - first)
    yield from pairwise(first + (last - first) * index // count for index in range(count + 1))


def _parallelism_faults(
    request: ResolvedRequest, parallel: Parallelism, virtual_stages: int, graph: Graph
) -> Iterator[str]:
    """Faults of a parallelism that fits the layers or the batch in no way."""
    if parallel.pipeline * virtual_stages > graph.layers:
        yield (
            f"`parallel.pipeline` x `parallel.virtual_stages` = {parallel.pipeline} x "
            f"{virtual_stages}, but `{graph.name}` has {graph.layers} layers, and every model "
            "chunk needs one; lower a degree"
        )
    if request.train.batch % parallel.data:
        yield (
            f"`parallel.data` = {parallel.data} does not divide `train.batch` = "
            f"{request.train.batch}; make one a multiple of the other"
        )


def _replica_request(request: ResolvedRequest, replicas: int) -> ResolvedRequest:
    """The request for what one replica does."""
    train = request.train.model_copy(update={"batch": request.train.batch // replicas})
    return with_whole_parallelism(request).model_copy(update={"train": train})
