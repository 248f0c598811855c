"""What a plan or a request asks for that a software stack cannot run, a sentence each."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from windlass.schema import (
    DEVICE_TIER,
    OWN_STACK,
    Capabilities,
    Plan,
    Request,
    Stack,
    TensorGrid,
)

_MOST_NAMED = 2
"""Stacks that a message names as a way out."""


class StackNeed(NamedTuple):
    """Something that a stack must be able to do, as its `can` table says it."""

    key: str
    """Such as `parallel.pipeline`."""
    value: object
    lacks: str
    """What a stack without it lacks, to follow `has no`."""
    ability: str
    """Key of the `can` table."""
    member: object = True
    """What that key must hold: true, or one of its list."""

    def is_met(self, can: Capabilities) -> bool:
        """Whether a stack that can so much has it."""
        if self.key == "parallel.schedule" and not can.pipeline:
            return True  # that it has no pipeline says another sentence
        held = getattr(can, self.ability)
        return held is True or held is None or (held is not False and self.member in held)

    def granted(self, can: Capabilities) -> Capabilities:
        """What a stack can with it in addition."""
        held = getattr(can, self.ability)
        more = True if isinstance(held, bool) else (*(held or ()), self.member)
        return can.model_copy(update={self.ability: more})


def capability_faults(
    choices: Plan | Request, stack: Stack, others: Sequence[Stack] = ()
) -> Iterator[str]:
    """What some choices ask for that a stack cannot run, each with a way out.

    Args:
        choices: a plan, or a request, whose open choices need nothing.
    """
    for need in unmet_needs(choices, stack):
        able = [f"`--stack {each.name}`" for each in others if need.is_met(each.can)]
        instead = " or ".join(("", *able[:_MOST_NAMED]))
        way_out = f"leave `{need.key}` out{instead and ' or choose ' + instead[4:]}"
        shown = _show(need.value)
        yield f"`{need.key}` = {shown}, but `{stack.name}` has no {need.lacks}; {way_out}"


def unmet_needs(choices: Plan | Request, stack: Stack) -> tuple[StackNeed, ...]:
    """What some choices ask of a stack that it cannot do."""
    return tuple(need for need in _needs(choices) if not need.is_met(stack.can))


def runtime_gaps(plan: Plan) -> tuple[str, ...]:
    """What Windlass's own runtime lacks to run a plan, to follow `has no`; empty if it runs it."""
    return tuple(dict.fromkeys(need.lacks for need in unmet_needs(plan, OWN_STACK)))


def _needs(choices: Plan | Request) -> Iterator[StackNeed]:
    """Everything that some choices ask of a stack."""
    yield from _parallel_needs(choices)
    yield from _sharding_needs(choices)
    yield from _state_needs(choices)
    precision, recompute = choices.precision, choices.recompute
    if precision is not None:
        lacks = f"computation in {precision}"
        yield StackNeed("precision", precision, lacks, "precisions", precision)
    if choices.compile is not None and (isinstance(choices, Request) or choices.compile):
        lacks = "layers that are compiled or not as a plan says"
        yield StackNeed("compile", choices.compile, lacks, "compile")
    if recompute not in (None, "none"):
        lacks = f"{recompute} recompute"
        yield StackNeed("recompute", recompute, lacks, "recompute", recompute)
    if choices.step_graph:
        yield StackNeed("step_graph", True, "steps that are recorded as a plan says", "step_graph")
    if choices.loss == "fused":
        lacks = "loss that is fused with the last projection"
        yield StackNeed("loss", "fused", lacks, "fused_loss")
    if choices.moments != "float32":
        lacks = f"optimizer moments in {choices.moments}"
        yield StackNeed("moments", choices.moments, lacks, "small_moments")
    tier = choices.offload.optimizer
    if tier not in (None, DEVICE_TIER):
        yield StackNeed("offload.optimizer", tier, "offload", "offload")
    if isinstance(choices, Request) and (choices.phases or 1) > 1:
        lacks = "weights that lie outside device memory"
        yield StackNeed("phases", choices.phases, lacks, "offload")


def _state_needs(choices: Plan | Request) -> Iterator[StackNeed]:
    """What is asked of the weights, and of what an optimizer keeps of them."""
    if isinstance(choices, Plan):
        prefix, optimizer, ema = "", choices.optimizer or "adamw", choices.ema
        sparsity = choices.model.sparsity if choices.model is not None else None
    else:
        prefix, train, sparsity = "train.", choices.train, choices.sparsity
        optimizer, ema = train.optimizer, train.ema
    lacks = f"optimizer `{optimizer}`"
    yield StackNeed(f"{prefix}optimizer", optimizer, lacks, "optimizers", optimizer)
    if ema is not None:
        lacks = "averages of weights"
        yield StackNeed(f"{prefix}ema", ema, lacks, "averages")
    if choices.master_weights is False:
        lacks = "bfloat16 weights without float32 copies"
        yield StackNeed("master_weights", False, lacks, "own_masters")
    if sparsity is not None:
        yield StackNeed("sparsity", "set", "sparse weights", "sparsity")


def _parallel_needs(choices: Plan | Request) -> Iterator[StackNeed]:
    parallel = choices.parallel
    for name in ("pipeline", "tensor", "context", "expert"):
        degree = getattr(parallel, name) or 1
        if degree > 1:
            yield StackNeed(f"parallel.{name}", degree, f"{name} parallelism", name)
    if isinstance(parallel.tensor, TensorGrid):
        lacks = "tensor parallelism in two dimensions"
        yield StackNeed("parallel.tensor", parallel.tensor, lacks, "tensor_grids")
    schedule, chunks = parallel.schedule, parallel.virtual_stages
    if schedule is None and (chunks or 1) > 1:
        key, lacks = "parallel.virtual_stages", "interleaved schedule"
        yield StackNeed(key, chunks, lacks, "schedules", "interleaved")
    # One stage runs the same in any schedule.
    elif schedule is not None and parallel.pipeline != 1:
        lacks = f"{schedule} schedule"
        yield StackNeed("parallel.schedule", schedule, lacks, "schedules", schedule)


def _sharding_needs(choices: Plan | Request) -> Iterator[StackNeed]:
    sharding, replicas = choices.sharding, choices.parallel.data
    parameters, optimizer = sharding.parameters or 1, sharding.optimizer or 1
    if parameters > 1:
        lacks = "sharding of parameters (ZeRO-3)"
        yield StackNeed("sharding.parameters", parameters, lacks, "sharding", "parameters")
    # A request that names the parameters' degree alone leaves the optimizer's to the planner.
    if optimizer > parameters and not (isinstance(choices, Request) and parameters > 1):
        lacks = "sharding of optimizer state (ZeRO-1)"
        yield StackNeed("sharding.optimizer", optimizer, lacks, "sharding", "optimizer")
    if sharding.reshard:
        lacks = "gathering of parameters for each pass"
        yield StackNeed("sharding.reshard", True, lacks, "reshard")
    if replicas is not None:
        replicas *= choices.parallel.context or 1
        for name, degree in (("parameters", parameters), ("optimizer", optimizer)):
            if degree not in (1, replicas):
                lacks = f"sharding over fewer than all {replicas} replicas (HSDP)"
                yield StackNeed(f"sharding.{name}", degree, lacks, "replica_groups")


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
