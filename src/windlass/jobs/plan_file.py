"""A plan that is given, from a file or as a value: finds the model and the machine it is for."""

from pathlib import Path
from typing import NamedTuple

from windlass import planner
from windlass.document import format_overrides
from windlass.errors import RequestError, StackError
from windlass.hardware import core_count
from windlass.jobs.known_machines import (
    HERE,
    Progress,
    find_machine,
    find_stack,
    on_stack,
    parts_of_plan,
)
from windlass.jobs.model_graph import capture, capture_tensor_degrees
from windlass.jobs.objects import NO_OBJECTS, PlannedObjects
from windlass.schema import OWN_STACK, Graph, Machine, ModelIdentity, Plan, Request, Stack
from windlass.stacks import stack_names


class PlanContext(NamedTuple):
    """A given plan with what it is for."""

    plan: Plan
    """Labelled with `machine`."""
    request: Request
    """Agrees with the plan."""
    graph: Graph
    """With shards for the plan's tensor-parallel degree."""
    machine: Machine
    notes: tuple[str, ...]
    """What a user should know, a sentence each."""


def load_plan(path: Path, request: Request) -> tuple[Plan, Request]:
    """The plan in a file, and the request with the plan's model and all that it decides.

    Args:
        path: the plan's TOML file.
        request: what is asked for beside the plan.

    Raises:
        WindlassError: the file cannot be read, or is no plan.
        InputErrors: every value of the request of which the plan has another.
    """
    plan = Plan.load(path)
    agreed = planner.request_of_plan(plan, request)
    return plan, _with_model(agreed, model_of_plan(plan, request.model_identity))


def plan_context(
    plan: Plan,
    request: Request,
    objects: PlannedObjects = NO_OBJECTS,
    *,
    progress: Progress | None = None,
) -> PlanContext:
    """The model, the machine and the request of a given plan.

    The plan's own machine counts unless the request names one.

    Args:
        plan: a plan for any machine.

    Raises:
        RequestError: the plan is for another model than the one that is named.
        InputErrors: every value of the request of which the plan has another.
    """
    model = model_of_plan(plan, request.model_identity)
    stack = stack_of_plan(plan, request)
    graph = capture(model, objects, stack)
    if graph.label != plan.graph:
        raise RequestError(_other_model(plan, model, graph, is_asked=model != plan.model))
    agreed = planner.request_of_plan(plan, request)
    name, _, fingerprint = plan.machine.partition("@")
    asked = request.machine if "machine" in request.model_fields_set else name
    needs = parts_of_plan(plan, graph)
    machine = on_stack(find_machine(asked, progress=progress, needs=needs), stack)
    if asked == HERE:
        machine = split_machine(plan.parallel.devices, machine)
    notes: tuple[str, ...] = ()
    if machine.label != plan.machine:
        what = f"`{name}`" if asked != name else f"`{name}` as it was ({fingerprint})"
        notes = (f"the plan was made for {what}; it is predicted anew for `{machine.label}`",)
    return PlanContext(
        plan=plan.model_copy(update={"machine": machine.label, "model": model}),
        request=_with_model(agreed, model).model_copy(
            update={"machine": asked, "stack": request.stack or plan.stack}
        ),
        graph=with_tensor_shards(model, graph, plan, objects, stack),
        machine=machine,
        notes=notes,
    )


def model_of_plan(plan: Plan, asked: ModelIdentity) -> ModelIdentity:
    """The plan's model, with whatever `asked` names in its place."""
    model = plan.model or ModelIdentity(name=plan.graph.rpartition("@")[0])
    changes = {name: getattr(asked, name) for name in asked.model_fields_set}
    if changes.get("name", model.name) != model.name:
        return asked
    return model.model_copy(update=changes)


def _with_model(request: Request, model: ModelIdentity) -> Request:
    train = request.train.model_copy(update={"frozen": model.frozen})
    parts = {"sparsity": model.sparsity, "lora": model.lora, "train": train}
    return request.model_copy(update={"model": model.dense, **parts})


def stack_of_plan(plan: Plan, request: Request) -> Stack | None:
    """The stack that a plan is for; None for Windlass's own runtime.

    Raises:
        StackError: the request names another stack, or the plan one of a file that the request does
            not name.
    """
    stack, own = find_stack(request.stack), plan.stack or OWN_STACK.name
    asked = OWN_STACK.name if stack is None else stack.name
    if request.stack is not None and asked != own:
        raise StackError(
            f"the plan is for the stack `{own}`, but `{asked}` is named; leave `--stack` out, or "
            "plan anew without the file"
        )
    if request.stack is None and plan.stack not in (None, *stack_names()):
        raise StackError(
            f"the plan is for the stack `{plan.stack}`, which is none of Windlass's; name its file "
            "by `--stack FILE.toml`"
        )
    return find_stack(request.stack or plan.stack)


def split_machine(devices: int, machine: Machine) -> Machine:
    """This machine, whose CPU is split into so many devices if it counts as one."""
    is_split = devices > machine.devices == 1 and machine.device.kind == "cpu"
    return machine.split(devices, cores=core_count()) if is_split else machine


def with_tensor_shards(
    model: ModelIdentity,
    graph: Graph,
    plan: Plan,
    objects: PlannedObjects = NO_OBJECTS,
    stack: Stack | None = None,
) -> Graph:
    """The graph with shards for the plan's tensor-parallel degree."""
    degree = plan.parallel.tensor
    if degree == 1:
        return graph
    return capture_tensor_degrees(model, graph, (degree,), objects=objects, stack=stack)


def _other_model(plan: Plan, model: ModelIdentity, graph: Graph, *, is_asked: bool) -> str:
    """Why the model is not the plan's: other dials are asked for, or its code has changed."""
    dials = model.model_dump(exclude={"name", "sparsity", "arguments"}, exclude_none=True)
    dials |= model.arguments or {}
    words = " ".join((model.name, *format_overrides(dials, "model.")))
    if model.sparsity is not None:
        dials = model.sparsity.model_dump(exclude_none=True, exclude_defaults=True)
        words = " ".join((words, *format_overrides(dials, "sparsity.")))
    again = f"plan this one by `windlass plan {words}`"
    way_out = f"name the plan's own model and its `model.*`, or {again}" if is_asked else again
    return f"the plan is for the model `{plan.graph}`, but `{words}` is `{graph.label}`; {way_out}"
