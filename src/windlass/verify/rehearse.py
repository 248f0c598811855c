"""Adapts a plan of any size to local processes of this machine, downscaled if need be."""

from dataclasses import replace

from windlass.cost import predict_plan
from windlass.errors import ModelError, PlanError
from windlass.jobs import (
    HERE,
    Planned,
    Progress,
    capture,
    find_machine,
    parts_of_plan,
    plan as choose_plan,
    split_machine,
    with_tensor_shards,
)
from windlass.models import (
    find_model_folder,
    has_config,
    is_huggingface,
    model_config,
    takes_images,
)
from windlass.planner import (
    PlanningResult,
    choose_plan as search_plan,
    downscale_plan as downscale,
    resolve_defaults,
)
from windlass.program import plan_errors, require_valid_plan
from windlass.schema import DataRequest, Graph, Machine, Plan, Request

MAX_PROCESSES = 8
"""Most processes of a rehearsal."""

_MAX_STEP_SECONDS = 20.0
"""Longest predicted step on this machine; a slower plan is downscaled."""

_STAND_IN_MODEL = "gpt2-124m"
"""A model that is not in the catalogue is rehearsed with this model's family."""

_UNLIMITED_BYTES = 2**50
"""A capacity of device memory in which any plan fits."""

_TEXT_BYTES = 2 * 2**20
"""Size of the text that a downscaled rehearsal trains on."""


def rehearsal(
    request: Request, *, progress: Progress | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """The plan to rehearse for a request, and a note if it does not fit the machine.

    A rehearsal is downscaled and cannot show whether memory suffices. So a plan that needs more
    memory than there is is rehearsed all the same, planned as if each device had enough.

    Args:
        request: a model, a machine, and the pinned parts of the plan.
        progress: called with how far planning is.

    Raises:
        WindlassError: what is wrong with the request.
    """
    planned = choose_plan(request, progress=progress)
    try:
        return planned.plan, ()
    except PlanError as error:
        if request.memory is not None:
            raise
        reason = str(error).splitlines()[0].partition(";")[0]
        machine = _with_unlimited_memory(planned.machine)
        result = search_plan(planned.request, planned.graph, machine)
        plan = replace(planned, machine=machine, result=result).plan
        return plan, (f"{reason}: planned as if each device had enough memory",)


def rehearse_as_is(
    plan: Plan, request: Request, *, progress: Progress | None = None
) -> Planned | None:
    """A plan for local processes, not downscaled; None if it must be.

    Args:
        plan: a plan for any machine.
        request: a model and data; the plan determines the rest.
        progress: called with how far a first measurement of this machine is.

    Returns:
        None if the plan is for another model, has too many devices, or does not fit this machine
        with a step of at most 20 s.

    Raises:
        WindlassError: what is wrong with the request.
    """
    if plan.parallel.devices > MAX_PROCESSES:
        return None
    graph = capture(request.model_identity)
    if graph.label != plan.graph:
        return None
    here = find_machine(HERE, progress=progress, needs=parts_of_plan(plan, graph))
    machine = split_machine(plan.parallel.devices, here)
    graph = with_tensor_shards(request.model_identity, graph, plan)
    plan = plan.model_copy(update={"machine": machine.label})
    if plan_errors(plan, graph, machine):
        return None
    planned = _planned(plan, request, graph, machine)
    prediction, capacity = planned.prediction, machine.device.memory.capacity_bytes
    fits = prediction.peaks[0].peak_bytes <= capacity
    return planned if fits and prediction.step_seconds <= _MAX_STEP_SECONDS else None


def downscale_plan(
    plan: Plan, request: Request, *, devices: int = MAX_PROCESSES, progress: Progress | None = None
) -> tuple[Planned, tuple[str, ...]]:
    """A downscaled plan for local processes, and what was changed, a sentence each.

    Args:
        plan: a plan of any size, for any machine; its `graph` label names the model.
        request: data and optimizer settings.
        devices: the most processes that it may take.
        progress: called with how far a first measurement of this machine is.

    Raises:
        InputErrors: the downscaled plan is not valid.
        ModelError: the model comes from a user's file and cannot be downscaled.
    """
    name = plan.graph.rpartition("@")[0]
    if is_huggingface(name):
        # The shape alone: trained weights have no smaller version.
        name = f"hf:{find_model_folder(name).config}"
    if ".py" in name:
        raise ModelError(
            f"`{name}` is a model of your own, which cannot be downscaled; plan for a smaller "
            f"version of it, with at most {MAX_PROCESSES} devices"
        )
    if takes_images(name):
        raise ModelError(
            f"`{name}` takes images, and only models of tokens are downscaled so far; check a plan "
            "of it with at most as many devices as this machine can run"
        )
    notes: tuple[str, ...] = ()
    if not has_config(name):
        notes = (
            f"`{name}` is not in the catalogue: blocks of the `{_STAND_IN_MODEL}` family stand in",
        )
        name = _STAND_IN_MODEL
    machine = split_machine(plan.parallel.devices, find_machine(HERE, progress=progress))
    tiers = tuple(tier.name for tier in machine.device.tiers[1:] if tier.read)
    small = downscale(plan, model_config(name), devices=devices, tiers=tiers)
    model = Request(model=small.model).model_identity
    graph = capture(model)
    here = find_machine(HERE, progress=progress, needs=parts_of_plan(small.plan, graph))
    machine = split_machine(small.plan.parallel.devices, here)
    graph = with_tensor_shards(model, graph, small.plan)
    text = DataRequest(
        source=request.data.source, tokenizer="byte", limit_bytes=_TEXT_BYTES,
        format=request.data.format, text_field=request.data.text_field,
    )  # fmt: skip
    train = request.train.model_copy(update={"frozen": None})
    parts = {"sparsity": None, "lora": None, "train": train}
    request = request.model_copy(update={"model": small.model, "data": text, **parts})
    if plan.model is not None and plan.model.sparsity is not None:
        notes = (*notes, "all weights are kept: a downscaled plan is rehearsed dense")
    if plan.model is not None and (plan.model.lora or plan.model.frozen):
        notes = (*notes, "all weights are trained: a downscaled plan is rehearsed without adapters")
    names = {"graph": graph.label, "machine": machine.label, "model": model}
    plan = small.plan.model_copy(update=names)
    require_valid_plan(plan, graph, machine)
    return _planned(plan, request, graph, machine), (*notes, *small.notes)


def _with_unlimited_memory(machine: Machine) -> Machine:
    """The machine with a device memory in which any plan fits."""
    memory, *others = machine.device.tiers
    memory = memory.model_copy(update={"capacity_bytes": _UNLIMITED_BYTES})
    device = machine.device.model_copy(update={"tiers": (memory, *others)})
    return machine.model_copy(update={"device": device})


def _planned(plan: Plan, request: Request, graph: Graph, machine: Machine) -> Planned:
    """The plan with a prediction, and with a request of the same batch and sequence."""
    train = request.train.model_copy(
        update={"batch": plan.global_batch, "sequence": plan.batch.sequence}
    )
    request = Request(
        model=request.model, sparsity=request.sparsity, lora=request.lora, data=request.data,
        train=train,
    )  # fmt: skip
    resolved, _ = resolve_defaults(request, graph, machine)
    result = PlanningResult(plan=plan, prediction=predict_plan(plan, graph, machine))
    return Planned(request=resolved, graph=graph, machine=machine, result=result)
