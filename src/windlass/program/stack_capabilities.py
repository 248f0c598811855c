"""What a plan or a request asks for that a software stack cannot run, a sentence each."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from windlass.schema import (
    DEVICE_TIER,
    OWN_STACK,
    Plan,
    Precision,
    Request,
    Stack,
    TensorGrid,
)

_MOST_NAMED = 2
"""Stacks that a message names as a way out."""


class _Need(NamedTuple):
    """Something that a stack must be able to do."""

    key: str
    """Such as `parallel.pipeline`."""
    value: object
    lacks: str
    """What a stack without it lacks, to follow `has no`."""
    is_met: Callable[[Stack], bool]


def capability_faults(
    choices: Plan | Request, stack: Stack, others: Sequence[Stack] = ()
) -> Iterator[str]:
    """What some choices ask for that a stack cannot run, each with a way out.

    Args:
        choices: a plan, or a request, whose open choices need nothing.
        stack: the stack.
        others: stacks to name where one of them can.
    """
    for key, value, lacks, is_met in _needs(choices):
        if not is_met(stack):
            able = [f"`--stack {each.name}`" for each in others if is_met(each)]
            instead = " or ".join(("", *able[:_MOST_NAMED]))
            way_out = f"leave `{key}` out{instead and ' or choose ' + instead[4:]}"
            yield f"`{key}` = {_show(value)}, but `{stack.name}` has no {lacks}; {way_out}"


def runtime_gaps(plan: Plan) -> tuple[str, ...]:
    """What Windlass's own runtime lacks to run a plan, to follow `has no`; empty if it runs it."""
    return tuple(dict.fromkeys(need.lacks for need in _needs(plan) if not need.is_met(OWN_STACK)))


def _needs(choices: Plan | Request) -> Iterator[_Need]:
    """Everything that some choices ask of a stack."""
    yield from _parallel_needs(choices)
    yield from _sharding_needs(choices)
    yield from _state_needs(choices)
    precision, recompute = choices.precision, choices.recompute
    if precision is not None:
        yield _Need("precision", precision, f"computation in {precision}", _computes_in(precision))
    if choices.compile is not None and (isinstance(choices, Request) or choices.compile):
        lacks = "layers that are compiled or not as a plan says"
        yield _Need("compile", choices.compile, lacks, lambda stack: stack.can.compile)
    if recompute not in (None, "none"):
        yield _Need(
            "recompute", recompute, f"{recompute} recompute",
            lambda stack: recompute in stack.can.recompute,
        )  # fmt: skip
    if choices.step_graph:
        yield _Need("step_graph", True, "steps that are recorded as a plan says", _is_own)
    if choices.loss == "fused":
        lacks = "loss that is fused with the last projection"
        yield _Need("loss", "fused", lacks, lambda stack: stack.can.fused_loss)
    if choices.moments != "float32":
        lacks = f"optimizer moments in {choices.moments}"
        yield _Need("moments", choices.moments, lacks, _is_own)
    tier = choices.offload.optimizer
    if tier not in (None, DEVICE_TIER):
        yield _Need("offload.optimizer", tier, "offload", lambda stack: stack.can.offload)
    if isinstance(choices, Request) and (choices.phases or 1) > 1:
        lacks = "weights that lie outside device memory"
        yield _Need("phases", choices.phases, lacks, lambda stack: stack.can.offload)


def _state_needs(choices: Plan | Request) -> Iterator[_Need]:
    """What is asked of the weights, and of what an optimizer keeps of them."""
    if isinstance(choices, Plan):
        prefix, optimizer, ema = "", choices.optimizer or "adamw", choices.ema
        sparsity = choices.model.sparsity if choices.model is not None else None
    else:
        prefix, train, sparsity = "train.", choices.train, choices.sparsity
        optimizer, ema = train.optimizer, train.ema
    yield _Need(
        f"{prefix}optimizer", optimizer, f"optimizer `{optimizer}`",
        lambda stack: stack.can.optimizers is None or optimizer in stack.can.optimizers,
    )  # fmt: skip
    if ema is not None:
        lacks = "averages of weights"
        yield _Need(f"{prefix}ema", ema, lacks, lambda stack: stack.can.averages)
    if choices.master_weights is False:
        lacks = "bfloat16 weights without float32 copies"
        yield _Need("master_weights", False, lacks, lambda stack: stack.can.own_masters)
    if sparsity is not None:
        yield _Need("sparsity", "set", "sparse weights", lambda stack: stack.can.sparsity)


def _parallel_needs(choices: Plan | Request) -> Iterator[_Need]:
    parallel = choices.parallel
    if (parallel.pipeline or 1) > 1:
        yield _Need(
            "parallel.pipeline", parallel.pipeline, "pipeline parallelism",
            lambda stack: stack.can.pipeline,
        )  # fmt: skip
    if (parallel.tensor or 1) > 1:
        yield _Need(
            "parallel.tensor", parallel.tensor, "tensor parallelism",
            lambda stack: stack.can.tensor,
        )  # fmt: skip
    if isinstance(parallel.tensor, TensorGrid):
        lacks = "tensor parallelism in two dimensions"
        yield _Need("parallel.tensor", parallel.tensor, lacks, _is_own)
    if (parallel.context or 1) > 1:
        yield _Need(
            "parallel.context", parallel.context, "context parallelism",
            lambda stack: stack.can.context,
        )  # fmt: skip
    if (parallel.expert or 1) > 1:
        yield _Need("parallel.expert", parallel.expert, "expert parallelism", _is_own)
    schedule = parallel.schedule
    if schedule is None and (parallel.virtual_stages or 1) > 1:
        yield _Need(
            "parallel.virtual_stages", parallel.virtual_stages, "interleaved schedule",
            lambda stack: "interleaved" in stack.can.schedules,
        )  # fmt: skip
    # One stage runs the same in any schedule.
    elif schedule is not None and parallel.pipeline != 1:
        yield _Need(
            "parallel.schedule", schedule, f"{schedule} schedule",
            lambda stack: not stack.can.pipeline or schedule in stack.can.schedules,
        )  # fmt: skip


def _sharding_needs(choices: Plan | Request) -> Iterator[_Need]:
    sharding, replicas = choices.sharding, choices.parallel.data
    parameters, optimizer = sharding.parameters or 1, sharding.optimizer or 1
    if parameters > 1:
        yield _Need(
            "sharding.parameters", parameters, "sharding of parameters (ZeRO-3)",
            lambda stack: "parameters" in stack.can.sharding,
        )  # fmt: skip
    # A request that names the parameters' degree alone leaves the optimizer's to the planner.
    if optimizer > parameters and not (isinstance(choices, Request) and parameters > 1):
        yield _Need(
            "sharding.optimizer", optimizer, "sharding of optimizer state (ZeRO-1)",
            lambda stack: "optimizer" in stack.can.sharding,
        )  # fmt: skip
    if sharding.reshard:
        yield _Need(
            "sharding.reshard", True, "gathering of parameters for each pass",
            lambda stack: stack.can.reshard,
        )  # fmt: skip
    if replicas is not None:
        replicas *= choices.parallel.context or 1
        for name, degree in (("parameters", parameters), ("optimizer", optimizer)):
            if degree not in (1, replicas):
                lacks = f"sharding over fewer than all {replicas} replicas (HSDP)"
                yield _Need(
                    f"sharding.{name}", degree, lacks, lambda stack: stack.can.replica_groups
                )


def _computes_in(precision: Precision) -> Callable[[Stack], bool]:
    return lambda stack: precision in stack.can.precisions


def _is_own(stack: Stack) -> bool:
    """Whether it is Windlass's own runtime, the only one with some choices."""
    return stack.name == OWN_STACK.name


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
