"""Rehearsing: a plan of any size made ready for local processes, in small if it must be."""

from pathlib import Path

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import capture, capture_tensor_degrees
from windlass.api.plan import Planned
from windlass.api.plan import plan as plan_of
from windlass.cost.predict import predict
from windlass.errors import ModelError, PlanError
from windlass.models import catalog as catalogue
from windlass.planner.downscale import downscale_plan as downscale
from windlass.planner.result import PlanningResult
from windlass.program.validate_plan import plan_errors, require_valid_plan
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.request import DataRequest, ModelRequest, Request

MAX_PROCESSES = 8
"""Most that a rehearsal takes."""

_LONGEST_STEP = 20.0
"""Seconds. A plan whose step is predicted to take longer here is proved in small."""

_STANDS_IN = "gpt2-124m"
"""Its family takes the place of a model that nobody here knows."""

_ROOM = 2**50
"""Bytes of near memory in which any plan fits."""

_TEXT_BYTES = 2 * 2**20
"""That a proof in small takes its samples from."""


def rehearsal(
    request: Request, *, progress: Progress | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a request, and a sentence if it does not fit the machine.

    What a large size alone shows, memory, no rehearsal shows: so a cut that needs more of it than
    there is is rehearsed all the same, planned as if each device had room.

    Args:
        request: of a model, a machine, and whatever of the plan is pinned.
        progress: told how far a first measurement of this machine is.

    Raises:
        WindlassError: what is wrong with the request.
    """
    try:
        return plan_of(request, progress=progress).plan, ()
    except PlanError as refusal:
        if request.memory is not None:
            raise
        roomy = request.model_copy(update={"memory": _ROOM})
        told = str(refusal).splitlines()[0].partition(";")[0]
        found = plan_of(roomy, progress=progress).plan
        return found, (f"{told}: planned as if each device had room enough",)


def rehearse_as_is(
    plan: Plan, request: Request, *, progress: Progress | None = None
) -> Planned | None:
    """A plan for this machine's processes, if the model is its own and a step is no great matter.

    Args:
        plan: for whichever machine.
        request: of a model and data; the plan says all else.
        progress: told how far a first measurement of this machine is.

    Raises:
        WindlassError: what is wrong with the request.
    """
    if plan.parallel.devices > MAX_PROCESSES:
        return None
    graph = capture(request.model)
    if graph.label != plan.graph:
        return None
    machine = _here(plan, progress)
    graph = _cut(request.model, graph, plan)
    plan = plan.model_copy(update={"machine": machine.label})
    if plan_errors(plan, graph, machine):
        return None
    planned = _planned(plan, request, graph, machine)
    near = machine.device.memory.capacity_bytes
    fits = planned.prediction.peaks[0].peak_bytes <= near
    return planned if fits and planned.prediction.step_seconds <= _LONGEST_STEP else None


def downscale_plan(
    plan: Plan, request: Request, *, devices: int = MAX_PROCESSES, progress: Progress | None = None
) -> tuple[Planned, tuple[str, ...]]:
    """A plan in small for this machine's processes, and what was changed, a sentence each.

    Args:
        plan: of any size, for whichever machine; its label names the model.
        request: of data and optimisation.
        devices: most that it may take.
        progress: told how far a first measurement of this machine is.

    Raises:
        Faults: the plan is not legal, in small either.
        ModelError: the model is of a file of the user's own, which has no small form.
    """
    name = plan.graph.partition("@")[0]
    if ".py" in name:
        raise ModelError(
            f"`{name}` is a model of your own, which only you can make smaller; let the plan be "
            f"for a small one, with at most {MAX_PROCESSES} devices"
        )
    notes: tuple[str, ...] = ()
    if name not in catalogue.model_names():
        notes = (
            f"`{name}` is not in the catalogue: blocks of the family of `{_STANDS_IN}` stand in",
        )
        name = _STANDS_IN
    machine = _here(plan, progress)
    tiers = tuple(tier.name for tier in machine.device.tiers[1:] if tier.read)
    small = downscale(plan, catalogue.model_config(name), devices=devices, tiers=tiers)
    machine = _here(small.plan, progress)
    graph = _cut(small.model, capture(small.model), small.plan)
    labels = {"graph": graph.label, "machine": machine.label}
    text = DataRequest(
        source=request.data.source, tokenizer="byte", limit_bytes=_TEXT_BYTES,
        text_field=request.data.text_field,
    )  # fmt: skip
    request = request.model_copy(update={"model": small.model, "data": text})
    plan = small.plan.model_copy(update=labels)
    require_valid_plan(plan, graph, machine)
    return _planned(plan, request, graph, machine), (*notes, *small.notes)


def load_plan(path: Path) -> Plan:
    """A plan from its file.

    Raises:
        WindlassError: it cannot be read, or is no plan.
    """
    return Plan.load(path)


def _here(plan: Plan, progress: Progress | None) -> Machine:
    machine, devices = find_machine(HERE, progress=progress), plan.parallel.devices
    return machine.split(devices) if devices > 1 and machine.device.kind == "cpu" else machine


def _cut(model: ModelRequest, graph: Graph, plan: Plan) -> Graph:
    degree = plan.parallel.tensor
    return graph if degree == 1 else capture_tensor_degrees(model, graph, (degree,))


def _planned(plan: Plan, request: Request, graph: Graph, machine: Machine) -> Planned:
    """A plan with a request that asks for it."""
    train = request.train.model_copy(
        update={"batch": plan.global_batch, "sequence": plan.batch.sequence}
    )
    asked = Request(model=request.model, data=request.data, train=train)
    choice = PlanningResult(plan=plan, prediction=predict(plan, graph, machine))
    return Planned(request=asked, graph=graph, machine=machine, result=choice)
