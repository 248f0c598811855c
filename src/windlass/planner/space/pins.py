"""Pins: parts of a plan that a request names. Each is kept, or refused in a sentence."""

from collections.abc import Iterator
from math import prod

from windlass.planner.recompute_layers import (
    recompute_layers,
    show_recompute_layers,
    with_recompute_layers,
)
from windlass.program import (
    capability_faults,
    context_errors,
    context_run_errors,
    float8_errors,
    master_weight_errors,
    moment_errors,
    offloaded_optimizer_errors,
    recomputable_layers,
    sparse_state_errors,
    step_graph_errors,
)
from windlass.schema import (
    DEVICE_TIER,
    OWN_STACK,
    Batch,
    Graph,
    Machine,
    Offload,
    Parallelism,
    PipelineSchedule,
    Plan,
    Request,
    ResolvedRequest,
    Stage,
)
from windlass.stacks import load_stack, stack_names
from windlass.units import format_bytes

_SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")
"""Schedules of a single device, which are all the same there."""


def pin_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """Pins that contradict each other or the machine, a sentence each."""
    yield from stack_faults(request, machine)
    yield from _device_faults(request, machine)
    yield from context_errors(request.parallel.context or 1, request.train.sequence)
    yield from _schedule_faults(request, machine)
    yield from _recompute_faults(request, machine)
    yield from _optimizer_tier_faults(request, machine)
    yield from _attention_faults(request, machine)
    yield from _float8_faults(request, machine)
    if request.phases not in (None, 1):
        for pin, reason in _excluding_pins(request, machine):
            yield f"{pin} with `phases` = {request.phases}: {reason}; leave one of them out"
    if request.recompute == "selective" and request.compile:
        yield (
            "`recompute` = selective with `compile`: a compiled layer already recomputes what "
            "takes no time; set `compile` = false, or `recompute` = none or full"
        )
    if request.precision == "float64" and request.moments != "float32":
        yield f"`precision` = float64 with `moments` = {request.moments}; set `moments` = float32"
    yield from moment_errors(request.train.optimizer, request.moments)
    yield from sparse_state_errors(request.train.optimizer, sparse=request.sparsity is not None)
    if not request.master_weights:
        yield from master_weight_errors(request.train.optimizer, request.precision)
    capacity = machine.device.memory.capacity_bytes
    if request.memory is not None and request.memory > capacity:
        yield (
            f"`memory` = {format_bytes(request.memory)}, but each device of `{machine.name}` has "
            f"{format_bytes(capacity)}; lower it or leave it out"
        )


def stack_faults(request: Request, machine: Machine) -> Iterator[str]:
    """Pins that the stack of the machine cannot run, or what the machine lacks for the stack."""
    stack = machine.stack or OWN_STACK
    if any(capability_faults(request, stack)):
        known = [load_stack(name) for name in stack_names()]
        known.sort(key=lambda each: len(tuple(capability_faults(request, each))))
        yield from capability_faults(request, stack, known)
    if machine.stack is not None and not any(map(machine.device.computes_in, stack.can.precisions)):
        wanted = " or ".join(stack.can.precisions)
        yield (
            f"`{machine.name}` states no rate in {wanted}, in which `{stack.name}` computes; add a "
            "`[[device.matmul]]` of that precision to a file of the machine, or choose another "
            "`--stack`"
        )


def single_device_faults(request: ResolvedRequest) -> Iterator[str]:
    """Pins that are of use on several devices only."""
    schedule, chunks = request.parallel.schedule, request.parallel.virtual_stages
    if schedule is not None and schedule not in _SCHEDULES:
        known = ", ".join(f"`{order}`" for order in _SCHEDULES)
        yield (
            f"`parallel.schedule` = {schedule} on one device, which has no "
            f"pipeline; choose one of {known}, or set `parallel.pipeline`"
        )
    elif chunks not in (None, 1):
        yield (
            f"`parallel.virtual_stages` = {chunks} on one device, which has no pipeline; leave it "
            "out, or set `parallel.pipeline`"
        )
    shared = ((f"sharding.{name}", degree) for name, degree in request.sharding)
    for name, degree in (("parallel.expert", request.parallel.expert), *shared):
        if degree is not None and degree > 1:
            yield f"`{name}` = {degree} on one device; set `parallel.data` too"


def pinned_parallelism(request: Request) -> Parallelism:
    """The parallelism that a request names; degrees that it leaves open are 1."""
    named, layers = request.parallel, request.recompute_layers
    stages = len(layers) if isinstance(layers, tuple) else 1
    return Parallelism(
        pipeline=named.pipeline or stages,
        tensor=named.tensor or 1,
        data=named.data or 1,
        context=named.context if (named.context or 1) > 1 else None,
        expert=named.expert if (named.expert or 1) > 1 else None,
    )


def without_excluded_phases(request: ResolvedRequest, machine: Machine) -> ResolvedRequest:
    """The request with `phases` = 1 if no plan in phases can keep its pins."""
    if request.phases is None and any(_excluding_pins(request, machine)):
        return request.model_copy(update={"phases": 1})
    return request


def excludes_phases(request: ResolvedRequest) -> bool:
    """Whether a request rules phases out: in phases all state is offloaded to one tier."""
    return request.phases == 1 or request.offload.optimizer is not None


def broken_pins(request: Request, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Key, asked value and the plan's value of each pin that a plan does not keep."""
    named_optimizer = "optimizer" in request.train.model_fields_set
    asked_optimizer = request.train.optimizer if named_optimizer else None
    asked_moments = request.moments if "moments" in request.model_fields_set else None
    pairs: dict[str, tuple[object, object]] = {
        f"{section}.{key}": (pin, getattr(getattr(plan, section), key))
        for section in ("parallel", "sharding", "offload", "batch")
        for key, pin in getattr(request, section)
    }
    pairs |= {
        "train.batch": (request.train.batch, plan.global_batch),
        "train.sequence": (request.train.sequence, plan.batch.sequence),
        "precision": (request.precision, plan.precision),
        "train.optimizer": (asked_optimizer, plan.optimizer or "adamw"),
        "train.ema": (request.train.ema, plan.ema),
        "master_weights": (None if request.master_weights else False, plan.has_master_weights),
        "moments": (asked_moments, plan.moments),
        "compile": (request.compile, plan.compile),
        "deterministic": (request.deterministic or None, bool(plan.deterministic)),
        "step_graph": (request.step_graph, bool(plan.step_graph)),
        "loss": (request.loss, plan.loss or "plain"),
        "attention": (request.attention, plan.attention or "flash"),
        "phases": (request.phases, plan.phase_count),
    }
    layers = request.recompute_layers
    if any(recomputable_layers(plan, stage) for stage in plan.stages):
        pairs["recompute"] = (request.recompute, plan.recompute)
        if layers is not None and with_recompute_layers(plan, layers).stages != plan.stages:
            theirs = show_recompute_layers(recompute_layers(plan))
            yield "recompute_layers", show_recompute_layers(layers), theirs
    context, reshard = plan.parallel.context or 1, bool(plan.sharding.reshard)
    asked_stack = None if request.stack is None else load_stack(request.stack).name
    pairs["stack"] = (asked_stack, plan.stack or OWN_STACK.name)
    pairs["parallel.context"] = (request.parallel.context, context)
    pairs["parallel.expert"] = (request.parallel.expert, plan.parallel.expert_degree)
    pairs["sharding.reshard"] = (request.sharding.reshard, reshard)
    for key, (asked, planned) in pairs.items():
        if asked is not None and asked != planned:
            yield key, _show(asked), _show(planned)
    clip, asks = request.train.clip, "clip" in request.train.model_fields_set
    # A plan in float16 takes the norm, with or without a clip, because it scales the loss.
    if asks and plan.precision != "float16" and (clip is not None) != plan.clip:
        yield "train.clip", _show(clip or "inf"), f"`clip` = {_show(plan.clip)}"


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _attention_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """A way to compute attention whose speed on this machine nobody knows."""
    measured = {
        rate.attention or "flash"
        for products in machine.device.matmul
        for rate in products.attention_rates
    } | {"flash"}
    if request.attention not in (None, *measured):
        yield (
            f"`attention` = {request.attention}, but `{machine.name}` states no rate for it; "
            f"choose {' or '.join(sorted(measured))}, or leave it out"
        )


def _float8_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """Why linear layers cannot multiply 8-bit factors as a request asks, whatever the plan."""
    if request.precision != "float8" or machine.stack is not None:
        return
    yield from float8_errors(request.parallel.tensor or 1, request.model_identity)


def uses_one_device(request: Request) -> bool:
    """Whether a request names one device, however many a machine has."""
    named = request.parallel
    return named.pipeline == named.tensor == named.data == 1 and named.context in (None, 1)


def context_faults(request: ResolvedRequest, graph: Graph, machine: Machine) -> Iterator[str]:
    """Why our own runtime cannot divide sequences as a request asks, whatever the plan."""
    if machine.stack is None:
        degree, tensor = request.parallel.context or 1, request.parallel.tensor or 1
        yield from context_run_errors(degree, graph, tensor, request.train.sequence)


def step_graph_faults(request: ResolvedRequest, graph: Graph, machine: Machine) -> Iterator[str]:
    """Why steps cannot be recorded as a request asks, whatever the plan."""
    if not request.step_graph or machine.stack is not None:
        return
    if machine.devices > 1 and not uses_one_device(request):
        yield (
            f"`step_graph` = true on {machine.devices} devices: this version records the steps of "
            "one device; set `parallel.pipeline`, `parallel.tensor` and `parallel.data` to 1, or "
            "leave `step_graph` out"
        )
    tier, optimizer = request.offload.optimizer or DEVICE_TIER, request.train.optimizer
    plan = Plan(
        graph=graph.label, machine=machine.label, model=request.model_identity,
        optimizer=None if optimizer == "adamw" else optimizer, moments=request.moments,
        master_weights=None if request.master_weights else False,
        offload=Offload(optimizer=tier), batch=Batch(sequence=request.train.sequence, micro=1),
        stages=(Stage(phases=((0, 1),)),),
    )  # fmt: skip
    yield from step_graph_errors(plan, graph, machine)
    if request.data.packing:
        yield (
            "`step_graph` = true with `data.packing`, whose rows hold as many documents as the "
            "host counts in each pass; leave one of them out"
        )


def _excluding_pins(request: ResolvedRequest, machine: Machine) -> Iterator[tuple[str, str]]:
    """Pins that no plan in phases keeps, each with the reason."""
    recompute, parallel, tier = request.recompute, request.parallel, request.offload.optimizer
    if tier is not None:
        pin = f"`offload.optimizer` = {tier}"
        yield pin, "phases offload weights and optimizer state together"
    if request.step_graph:
        yield "`step_graph` = true", "each step starts transfers"
    again = "every layer outside a stage's last phase is recomputed in full"
    if recompute == "none" or (recompute == "selective" and machine.devices == 1):
        yield f"`recompute` = {recompute}", again
    if request.recompute_layers is not None:
        yield f"`recompute_layers` = {show_recompute_layers(request.recompute_layers)}", again
    own = "phases have a schedule of their own, in which all micro-batches run through one phase"
    if parallel.schedule == "zero-bubble":
        yield "`parallel.schedule` = zero-bubble", own
    if request.precision == "float64":
        yield "`precision` = float64", "float64 verifies plans in device memory"
    if any(offloaded_optimizer_errors(request.train.optimizer, machine.devices)):
        pin = f"`train.optimizer` = {request.train.optimizer}"
        yield pin, "here it updates whole weights in device memory"


def _device_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """Degrees that ask for more devices than there are."""
    degrees = {
        name: degree
        for name in ("pipeline", "tensor", "data", "context")
        if (degree := getattr(request.parallel, name) or 1) > 1
    }
    asked, count = prod(degrees.values()), machine.devices
    if asked > count:
        names = " x ".join(f"`parallel.{name}`" for name in degrees)
        values = " x ".join(str(degree) for degree in degrees.values())
        total = f"{values} = {asked}" if len(degrees) > 1 else values
        have = f"{count} device{'s' if count > 1 else ''}"
        yield (
            f"{names} = {total}, but `{machine.name}` has {have}; lower a degree, leave it open, "
            "or plan for a machine of more devices"
        )


def _schedule_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """A schedule that does not go with the number of virtual stages or of pipeline stages."""
    schedule, chunks = request.parallel.schedule, request.parallel.virtual_stages
    if schedule not in (None, "interleaved") and chunks not in (None, 1):
        yield (
            f"`parallel.virtual_stages` = {chunks} with `parallel.schedule` = {schedule}, which "
            "runs a stage as one model chunk; set `parallel.schedule` = interleaved or "
            "`parallel.virtual_stages` = 1"
        )
    if schedule == "interleaved" and chunks == 1:
        yield (
            "`parallel.schedule` = interleaved with `parallel.virtual_stages` = 1: model chunks "
            "take turns only if a stage has 2 or more; raise it or leave it open"
        )
    has_pipeline = schedule not in (None, "1f1b") or chunks not in (None, 1)
    if has_pipeline and machine.devices > 1 and request.parallel.pipeline == 1:
        pin = f"schedule` = {schedule}" if schedule else f"virtual_stages` = {chunks}"
        yield (
            f"`parallel.{pin} with `parallel.pipeline` = 1, which has no pipeline; raise "
            "`parallel.pipeline` or leave one of them open"
        )


def _recompute_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """Whether `recompute_layers` names another number of stages than there can be."""
    layers, pipeline = request.recompute_layers, request.parallel.pipeline
    if not isinstance(layers, tuple):
        return
    shown = f"`recompute_layers` = {show_recompute_layers(layers)} is for {len(layers)} stages"
    if pipeline is not None and len(layers) != pipeline:
        yield (
            f"{shown}, but `parallel.pipeline` = {pipeline}; give one number for each stage, "
            "or one for all of them"
        )
    elif len(layers) > machine.devices:
        yield (
            f"{shown}, but `{machine.name}` has {machine.devices} device"
            f"{'s' if machine.devices > 1 else ''}; give one number for each stage"
        )


def _optimizer_tier_faults(request: ResolvedRequest, machine: Machine) -> Iterator[str]:
    """Why optimizer state cannot live where the request wants it."""
    wanted = request.offload.optimizer
    if wanted is None:
        return
    tiers = [
        tier.name for tier in machine.device.tiers if tier is machine.device.memory or tier.read
    ]
    if wanted not in tiers:
        yield (
            f"`offload.optimizer` = {wanted}, but `{machine.name}` has only "
            f"{', '.join(tiers)}; choose one of them"
        )
    if wanted != DEVICE_TIER:
        yield from offloaded_optimizer_errors(request.train.optimizer, machine.devices)
    if wanted != DEVICE_TIER and request.precision == "float64":
        yield (
            f"`offload.optimizer` = {wanted} with `precision` = float64, which verifies "
            f"plans in memory; set `offload.optimizer` = {DEVICE_TIER}, or `precision` = float32"
        )
