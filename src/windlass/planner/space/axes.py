"""Axes: which choices of a plan a search had, in words."""

from collections.abc import Iterator, Sequence

from windlass.planner.space.open_choices import MAX_VIRTUAL_STAGES, VIRTUAL_STAGES
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import MOST_SPANNING, PHASES, names_pipeline
from windlass.planner.space.pins import excludes_phases, without_excluded_phases
from windlass.planner.space.plan_space import PlanSpace
from windlass.schema import OWN_STACK


def explain_axes(space: PlanSpace, pinned: Sequence[str]) -> str:
    """Which choices a search had, which ones were pinned, and which ones there are none of.

    Args:
        pinned: keys of a plan that the request names.
    """
    is_open = _is_open(space)
    chosen = [key for key, opens in is_open.items() if opens]
    closed = [key for key in is_open if key not in chosen and key not in pinned]
    parts = [f"searched {', '.join(chosen)}"]
    if pinned:
        parts.append(f"the request pins {', '.join(pinned)}")
    if closed:
        stack = space.machine.stack
        which = "model and machine leave" if stack is None else f"model and `{stack.name}` leave"
        parts.append(f"{which} no choice of {', '.join(closed)}")
    return "; ".join((*parts, *_listed(space, chosen)))


def _listed(space: PlanSpace, chosen: Sequence[str]) -> Iterator[str]:
    """Of which choices not all values that a request may name were searched, with those that were.

    No argument rules the others out.
    """
    if "parallel.tensor" in chosen:
        degrees = map(str, sorted(space.tensor_degrees))
        yield f"of tensor-parallel degrees {', '.join(degrees)}"
    if "parallel.virtual_stages" in chosen:
        usual = ", ".join(map(str, VIRTUAL_STAGES))
        yield (
            f"of virtual stages {usual}, and up to {MAX_VIRTUAL_STAGES} that divide blocks evenly"
        )
    if "phases" in chosen:
        layers = space.graph.layers
        usual = ", ".join(str(count) for count in PHASES if count < layers)
        yield f"of phases of a stage {usual}, and one for each layer"
        if "parallel.pipeline" in chosen and not names_pipeline(space.request):
            yield f"phases across stages with at most {MOST_SPANNING} micro-batches a step"


def _is_open(space: PlanSpace) -> dict[str, bool]:
    """Whether there is more than one value of each key."""
    request, machine, shares = space.request, space.machine, space.request.sharding
    can, several = (machine.stack or OWN_STACK).can, machine.devices > 1
    schedules = {schedule for schedule, _ in space.open_schedules(2)} if several else set[str]()
    shards = set(can.sharding) if several else set[str]()
    in_turn = bool(offload_tiers(machine)) and request.phases is None
    return {
        "parallel.pipeline": len(space.pipeline_degrees) > 1,
        "parallel.tensor": len(space.tensor_degrees) > 1,
        "parallel.data": len(space.data_degrees) > 1,
        "parallel.context": len(space.context_degrees) > 1,
        "parallel.expert": len(space.expert_degrees) > 1,
        "parallel.schedule": len(schedules) > 1,
        "parallel.virtual_stages": "interleaved" in schedules
        and request.parallel.virtual_stages is None,
        "sharding.parameters": "parameters" in shards and shares.parameters is None,
        "sharding.optimizer": "optimizer" in shards and shares.optimizer is None,
        "sharding.reshard": several and can.reshard and shares.reshard is None,
        "offload.optimizer": len(space.optimizer_tiers(space.precisions[0])) > 1,
        "phases": in_turn and not excludes_phases(without_excluded_phases(request, machine)),
        "batch.micro": any(len(space.microbatches(count)) > 1 for count in space.data_degrees),
        "precision": len(space.precisions) > 1,
        "compile": len(space.compile_modes) > 1,
        "recompute": space.minimizes_recompute and len(can.recompute) > 1,
        "loss": len(space.losses) > 1,
        "attention": len(space.attentions) > 1,
    }
