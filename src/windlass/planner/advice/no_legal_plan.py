"""The error of a request whose pins no plan keeps all at once."""

import re
from collections.abc import Iterator
from itertools import pairwise

from windlass.errors import InputErrors, PlanError, WindlassError
from windlass.planner.recompute_layers import show_recompute_layers
from windlass.planner.space.options import batch_faults, vary
from windlass.planner.space.pins import pinned_parallelism
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import plan_errors
from windlass.schema import (
    DEVICE_TIER,
    Batch,
    Offload,
    Plan,
    ResolvedRequest,
    ShardingDegrees,
    Stage,
)

_KEY_AND_VALUE = re.compile(r"(?<! x )`([a-z_.]+)` = ")
"""What a sentence says that a request asks for."""


def no_legal_plan(space: PlanSpace) -> WindlassError:
    """The error that says what is wrong with a request's pins, as far as single pins tell."""
    machine, pins = space.machine, dict(_pins(space.request))
    faults = tuple(_size_faults(space))
    if not faults:
        faults = plan_errors(_named_plan(space), space.graph, machine)
        # Plain values complete what the request names; their faults are none of the user's.
        faults = tuple(each for each in faults if set(_KEY_AND_VALUE.findall(each)) <= pins.keys())
    if faults:
        return InputErrors(faults)
    asked = ", ".join(f"`{key}` = {value}" for key, value in pins.items())
    return PlanError(
        f"no plan of `{space.graph.name}` for {machine.devices} devices of `{machine.name}` keeps "
        f"all of {asked} at once; leave one of them out"
    )


def _size_faults(space: PlanSpace) -> Iterator[str]:
    """Faults of parallel degrees that divide neither the layers nor the batch."""
    request, parallel = space.request, pinned_parallelism(space.request)
    layers, chunks = space.graph.layers, request.parallel.virtual_stages or 1
    if parallel.pipeline * chunks > layers:
        yield (
            f"`parallel.pipeline` x `parallel.virtual_stages` = {parallel.pipeline} x "
            f"{chunks}, but `{space.graph.name}` has {layers} layers, and every model chunk needs "
            "one; lower a degree"
        )
    if request.train.batch % parallel.data:
        yield (
            f"`parallel.data` = {parallel.data} does not divide `train.batch` = "
            f"{request.train.batch}; make one a multiple of the other"
        )
    else:
        yield from batch_faults(request, parallel.data)


def _named_plan(space: PlanSpace) -> Plan:
    """The plan that a request names; what it leaves open has plain values."""
    request, parallel = space.request, pinned_parallelism(space.request)
    chunks, named = request.parallel.virtual_stages or 1, request.batch
    whole = request.train.batch // parallel.data
    micro = named.micro or (whole // named.accumulation if named.accumulation else 1)
    schedule = request.parallel.schedule or ("interleaved" if chunks > 1 else "1f1b")
    bounds = space.chunk_bounds(parallel.pipeline * chunks)
    plan = space.base.model_copy(
        update={
            "parallel": parallel.model_copy(
                update={"virtual_stages": chunks, "schedule": schedule}
            ),
            "sharding": ShardingDegrees(
                parameters=request.sharding.parameters or 1,
                optimizer=request.sharding.optimizer or 1,
            ),
            "offload": Offload(optimizer=request.offload.optimizer or DEVICE_TIER),
            "batch": Batch(sequence=space.sequence, micro=micro, accumulation=whole // micro),
            "stages": tuple(Stage(phases=(each,)) for each in pairwise(bounds)),
        }
    )
    return vary(
        plan,
        precision=request.precision,
        compiled=request.compile,
        recompute=request.recompute,
    )


def _pins(request: ResolvedRequest) -> Iterator[tuple[str, object]]:
    """The keys of a plan that a request names, with their values."""
    yield "train.batch", request.train.batch
    for name in ("parallel", "sharding", "offload", "batch"):
        for key, value in getattr(request, name):
            if value is not None:
                yield f"{name}.{key}", value
    for name in ("precision", "compile", "recompute"):
        if (value := getattr(request, name)) is not None:
            yield name, value
    if request.recompute_layers is not None:
        yield "recompute_layers", show_recompute_layers(request.recompute_layers)
    if (request.phases or 1) > 1:  # other pins imply a single one
        yield "phases", request.phases
