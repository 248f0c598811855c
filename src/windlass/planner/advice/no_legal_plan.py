"""The error of a request whose pins no plan keeps all at once."""

import re
from collections.abc import Iterator
from itertools import pairwise

from windlass.errors import InputErrors, PlanError, WindlassError
from windlass.planner.advice.single_changes import SingleChange, open_pins, request_pins
from windlass.planner.space.options import batch_faults, vary
from windlass.planner.space.pins import pinned_parallelism
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import plan_errors
from windlass.schema import (
    DEVICE_TIER,
    Batch,
    Offload,
    Plan,
    ShardingDegrees,
    Stage,
)
from windlass.units import format_bytes

_KEY_AND_VALUE = re.compile(r"(?<! x )`([a-z_.]+)` = ")
"""What a sentence says that a request asks for."""


def no_legal_plan(space: PlanSpace, budget_bytes: int) -> WindlassError:
    """The error that says what is wrong with a request's pins, and which one to change.

    Args:
        space: what is open; it has no plan.
    """
    machine, pins = space.machine, dict(request_pins(space.request))
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
        f"all of {asked} at once; {_way_out(space, budget_bytes)}"
    )


def _way_out(space: PlanSpace, budget_bytes: int) -> str:
    """The single changes with which there is a plan, those with which it fits first."""
    changes = sorted(open_pins(space, budget_bytes), key=lambda each: each.fitting is None)
    words = [
        f"`{' '.join(each.overrides)}` {_outcome(each, budget_bytes)}" for each in changes
    ]  # fmt: skip
    return ", or ".join(words) or "no single change makes one: leave several of them out"


def _outcome(change: SingleChange, budget_bytes: int) -> str:
    if change.fitting is not None:
        peak = change.fitting[1].peaks[0].peak_bytes
        return f"makes one that fits, with a predicted peak of {format_bytes(peak)}"
    if change.smallest is None:
        return "makes one"
    needed = format_bytes(change.smallest.peak_bytes)
    return f"makes one that needs {needed} at least, of {format_bytes(budget_bytes)}"


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
