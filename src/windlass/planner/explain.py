"""Explains a planning result in sentences, as values; the caller decides how to print them."""

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.planner.result import (
    Advice,
    Change,
    InfeasiblePlan,
    PinnedRank,
    PlanningResult,
    RunnerUp,
    TierShortage,
)
from windlass.program import describe_degrees, describe_recompute
from windlass.schema import Machine, Plan, ResolvedRequest
from windlass.units import format_bytes, format_seconds

_MIN_SENSITIVITY = 0.001
"""Share of a step below which a constant's sensitivity is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Sentences that explain a planning result."""

    verdict: str
    runners_up: tuple[str, ...]
    infeasible: tuple[str, ...]
    help: tuple[str, ...]
    """Changes that would make it fit, cheapest first; empty if it fits."""
    pinned_rank: str | None = None
    """Rank of the chosen plan among all plans without the request's pins; None if nothing is
    pinned."""
    sensitivity: tuple[str, ...] = ()
    """Savings from better constants of the machine, most first."""


def explain_result(result: PlanningResult) -> Explanation:
    """Why this plan, why not another, and what would help if none fits."""
    return Explanation(
        verdict=_verdict(result),
        runners_up=tuple(explain_runner_up(runner) for runner in result.runners_up),
        infeasible=tuple(explain_infeasible(infeasible) for infeasible in result.infeasible),
        help=tuple(explain_advice(result.advice)) if result.advice else (),
        pinned_rank=None if result.pinned_rank is None else explain_pinned_rank(result.pinned_rank),
        sensitivity=tuple(
            f"{name} 10 % better: {100 * share:.1f} % faster"
            for name, share in result.sensitivity.items()
            if share >= _MIN_SENSITIVITY
        ),
    )


def explain_runner_up(runner: RunnerUp) -> str:
    """Why a plan that fits lost: where it differs, by how much time, and in which term."""
    differs = ", ".join(f"{key}={value}" for key, value in runner.differs.items())
    if runner.slower_seconds == 0:
        return f"{differs}: as fast, and needs no less memory"
    share = runner.slower_seconds / (runner.run_seconds - runner.slower_seconds)
    loss = f"{differs}: {format_seconds(runner.slower_seconds)} slower ({100 * share:+.1f} %)"
    return f"{loss}, of which {runner.term} {format_seconds(runner.term_seconds)}"


def explain_infeasible(infeasible: InfeasiblePlan) -> str:
    """The bytes by which a plan does not fit, when, and what takes most memory then."""
    largest = infeasible.largest_class
    if infeasible.over_bytes <= 0:
        return f"{show_plan(infeasible.plan)}: {_show_tiers(infeasible.tiers)}"
    return (
        f"{show_plan(infeasible.plan)}: {format_bytes(infeasible.over_bytes)} too much at "
        f"{infeasible.instruction}; the largest class is {largest} with "
        f"{format_bytes(infeasible.by_class[largest])}"
    )


def explain_pinned_rank(rank: PinnedRank) -> str:
    """What the pinned plan loses against the fastest one without the pins."""
    if rank.best is None or rank.plan is None:
        return f"none of the {rank.compared:,} plans without these pins is faster"
    runner_up = rank.best
    share = runner_up.slower_seconds / (runner_up.run_seconds - runner_up.slower_seconds)
    return (
        f"of the {rank.compared:,} plans without these pins the fastest is {show_plan(rank.plan)}; "
        f"this one is predicted {100 * share:.1f} % slower, most of it in {runner_up.term}"
    )


def explain_advice(advice: Advice) -> Iterator[str]:
    """Changes that would make it fit, cheapest first; then more memory and more devices."""
    for change in advice.changes:
        yield explain_change(change)
    names_memory = any(
        key.startswith("memory=") for change in advice.changes for key in change.overrides
    )
    if not names_memory:
        away = "".join(
            f" and {format_bytes(each.needed_bytes)} of `{each.tier}`"
            for each in advice.nearest_tiers
        )
        yield f"a device with {format_bytes(advice.needed_bytes)} of memory{away} would do"
    yield from advice.in_phases
    for short in advice.tier_shortages:
        yield (
            f"{format_bytes(short.needed_bytes)} on {short.tier}, which has "
            f"{format_bytes(short.capacity_bytes)}, would let it run in phases in this memory"
        )
    state = f"weights, gradients and optimizer state ({format_bytes(advice.state_bytes)})"
    if advice.nearest_tiers:
        return
    if advice.devices is not None and advice.devices > advice.machine_devices:
        yield f"at least {advice.devices} devices of this size would hold {state}"
    elif advice.devices is not None and advice.machine_devices > 1:
        yield (
            f"more devices would not: {state} would fill {advice.devices} of "
            f"{advice.machine_devices}, and no plan divides them so evenly"
        )


def explain_change(change: Change, *before: str) -> str:
    """One change, its cost and its predicted peak memory; `before` overrides go with it."""
    direction = "slower" if change.cost > 0 else "faster"
    cost = (
        "as fast"
        if abs(change.cost) < 0.0005
        else f"{100 * abs(change.cost):.1f} % {direction} a token"
    )
    return (
        f"`{' '.join((*before, *change.overrides))}` makes it fit with a predicted peak of "
        f"{format_bytes(change.peak_bytes)}, {cost}"
    )


def explain_idle_devices(plan: Plan, request: ResolvedRequest, machine: Machine) -> str | None:
    """How many devices a plan leaves idle, why, and the way out; None if it uses all."""
    used, devices, named = plan.parallel.devices, machine.devices, request.parallel
    if used >= devices:
        return None
    if None not in (named.pipeline, named.tensor, named.data):
        why = "the request names its parallel degrees; leave one of them open"
    else:
        why = (
            f"with {request.train.batch:,} sequences a step, no plan for more of them is predicted "
            "to be faster; raise `train.batch` or name fewer devices"
        )
    return f"uses {used:,} of {devices:,} devices: {why}"


def show_plan(plan: Plan) -> str:
    """A plan in short: `float32, compiled, 2 micro-batches of 4, recomputes all layers`."""
    mode = "compiled" if plan.compile else "eager"
    count, micro = plan.batch.accumulation, plan.batch.micro
    batch = f"{count} micro-batches of {micro}" if count > 1 else f"one micro-batch of {micro}"
    moments = f", {plan.optimizer}" if plan.optimizer else ""
    moments += "" if plan.moments == "float32" else f", moments in {plan.moments}"
    offloaded = plan.is_offloaded("optimizer") and not plan.is_offloaded("parameters")
    tier = f", optimizer state on {plan.offload.optimizer}" if offloaded else ""
    phases = plan.phase_count
    recompute = describe_recompute(plan)
    if phases > 1:
        recompute = f"in {phases} phases, recomputes the layers of all but the last"
    loss = ", fused loss" if plan.loss else ""
    loss += f", {plan.attention} attention" if plan.attention else ""
    mode += ", deterministic" if plan.deterministic else ""
    mode += ", steps recorded" if plan.step_graph else ""
    text = f"{plan.precision}, {mode}, {batch}, {recompute}{moments}{loss}{tier}"
    return text if plan.parallel.devices == 1 else f"{show_parallelism(plan)}, {text}"


def show_parallelism(plan: Plan) -> str:
    """A plan's parallelism in short: `PP=8 TP=8 DP=4 FSDP=2 ZeRO-1=4, 1f1b, 2 virtual stages`."""
    parallel = plan.parallel
    schedule = f", {parallel.schedule}" if parallel.pipeline > 1 else ""
    chunks = f", {parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else ""
    return f"{describe_degrees(plan)}{schedule}{chunks}"


def _verdict(result: PlanningResult) -> str:
    if result.advice is not None:
        return _infeasible_verdict(result.advice)
    if result.plan is None or result.prediction is None or result.run_seconds is None:
        return "nothing was chosen"
    device, *others = result.prediction.peaks
    peaks = [
        f"{format_bytes(peak.peak_bytes)} of {format_bytes(peak.capacity_bytes)} in {peak.tier}"
        for peak in (device, *(peak for peak in others if peak.peak_bytes))
    ]
    return (
        f"fits: {show_plan(result.plan)}; predicted "
        f"{format_seconds(result.prediction.step_seconds)} a step, "
        f"{format_seconds(result.run_seconds)} in all, {' and '.join(peaks)}"
    )


def _infeasible_verdict(advice: Advice) -> str:
    """The verdict where nothing fits: needed bytes, and whether any change would help."""
    if advice.nearest_tiers:
        device = (
            f", and {format_bytes(advice.needed_bytes)} of device memory, which has "
            f"{format_bytes(advice.budget_bytes)}"
        ) * (advice.over_bytes > 0)
        return (
            f"does not fit: what comes nearest ({show_plan(advice.nearest)}) needs "
            f"{_show_tiers(advice.nearest_tiers)}{device}"
        )
    verdict = (
        f"does not fit: {format_bytes(advice.needed_bytes)} are needed at least (by "
        f"{show_plan(advice.nearest)}), the device has {format_bytes(advice.budget_bytes)}, "
        f"{format_bytes(advice.over_bytes)} too little"
    )
    if advice.devices is None:
        return f"{verdict}; the process alone holds {format_bytes(advice.by_class['runtime'])}"
    if not advice.changes:
        state = format_bytes(advice.state_bytes)
        return f"{verdict}; weights, gradients and optimizer state alone are {state}"
    return verdict


def _show_tiers(tiers: tuple[TierShortage, ...]) -> str:
    """`3.66 TiB of `memoryx`, which has 3.64 TiB`: the tiers that are too small."""
    return " and ".join(
        f"{format_bytes(each.needed_bytes)} of `{each.tier}`, which has "
        f"{format_bytes(each.capacity_bytes)}"
        for each in tiers
    )
