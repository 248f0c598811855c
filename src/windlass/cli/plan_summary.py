"""The answer of `windlass plan` in ten lines: what to launch, what it costs, why, and what next."""

from collections.abc import Iterator

from rich.text import Text

from windlass import api
from windlass.cli.console import console, print_plan
from windlass.planner import RunnerUp, explain_idle_devices
from windlass.program import describe_recompute
from windlass.report import describe_speedup, describe_stack, fact_table, parallel_degrees
from windlass.schema import Plan, Prediction, ResolvedRequest, SparseSpeedup, TierPeak
from windlass.units import format_bytes, format_count, format_seconds

_BOUNDS = {
    "matmul": "matrix products", "traffic": "memory bandwidth", "launch": "kernel launches",
    "update": "the optimizer's update", "communication and waiting":
    "communication and the pipeline's bubble", "load": "loading the batch",
    "waiting for offload": "transfers of offloaded tensors",
}  # fmt: skip
"""What bounds a step of which most is this term, where the term's own name is another."""
_TERMS_SHOWN = 3


def print_summary(planned: api.Planned, speedup: SparseSpeedup | None = None) -> None:
    """Prints the answer: a line of what is planned, then one for each of its parts.

    Args:
        planned: what is planned.
        speedup: what sparse weights gain; None if all are dense.
    """
    stack = "" if planned.machine.stack is None else f" with {planned.machine.stack.name}"
    size = format_count(planned.graph.parameter_count)
    where = f"{planned.graph.name}, {size} parameters, on {planned.machine.name}{stack}"
    console.print(Text(f"{where}; every figure is predicted", style="bold"))
    table = fact_table()
    for heading, words in summary_rows(planned):
        table.add_row(heading, Text(words))
    if speedup is not None:
        table.add_row("speed-up", Text(describe_speedup(speedup)))
    table.add_row("more", Text("--why, --runners-up, --picture FILE, --out PLAN.toml, --json"))
    console.print(table)


def print_predicted_plan(planned: api.Planned) -> None:
    """Prints a plan with its predicted step and memory, and the proved fastest if it is another."""
    print_plan(planned)
    prediction, fastest = planned.prediction, planned.result.fastest
    step, peak = format_seconds(prediction.step_seconds), prediction.peaks[0].peak_bytes
    text = f"    {step} a step, {format_bytes(peak)} at the peak"
    console.print(Text.assemble(("predicted", "bold"), text))
    if fastest is not None:
        console.print(Text.assemble(("fastest", "bold"), f"      {_fastest(fastest, planned)}"))
    console.print()


def summary_rows(planned: api.Planned) -> Iterator[tuple[str, str]]:
    """The lines of the answer, each as a heading with its words; every figure is predicted.

    Raises:
        PlanError: nothing fits.
    """
    plan, prediction, result = planned.plan, planned.prediction, planned.result
    yield "plan", _degrees(plan, planned)
    yield "batch", _batch(planned)
    yield "layers", _layers(plan)
    yield "step", _speed(prediction, plan, _device_word(planned))
    yield "memory", _memory(planned)
    yield "cost", dict(api.describe_job(planned))["run"]
    yield "why", _bound(prediction)
    yield "next", _next(planned)
    if result.fastest is not None:
        yield "fastest", _fastest(result.fastest, planned)
    if stack := describe_stack(plan):
        yield "stack", stack
    if keys := ", ".join(f"`{key}`" for key in api.unnamed_data(planned)):
        yield "data", f"`train` and `launch` ask for {keys} before a run of this size"
    if idle := explain_idle_devices(plan, planned.request, planned.machine):
        yield "devices", idle


def _device_word(planned: api.Planned) -> str:
    return "GPU" if planned.machine.device.kind == "cuda" else "device"


def _degrees(plan: Plan, planned: api.Planned) -> str:
    """`PP=2 TP=1 DP=16 FSDP=16 on 32 GPUs; interleaved, VPP=8; reshard_after_forward=false`."""
    parallel, word = plan.parallel, _device_word(planned)
    parts = [
        f"{parallel_degrees(plan)} on {parallel.devices:,} {word}{'s' * (parallel.devices > 1)}"
    ]
    if parallel.pipeline > 1:
        chunks = f", VPP={parallel.virtual_stages}" * (parallel.virtual_stages > 1)
        parts.append(f"{parallel.schedule}{chunks}")
    if plan.sharding.parameters > 1:
        parts.append(f"reshard_after_forward={str(bool(plan.sharding.reshard)).lower()}")
    return "; ".join(parts)


def _batch(planned: api.Planned) -> str:
    """`256 sequences of 8,192 tokens (by default): micro-batch 1 × 16 accumulated × DP 16`."""
    plan, examples = planned.plan, planned.graph.examples
    size = f"{plan.global_batch:,} sequences of {plan.batch.sequence:,} tokens"
    if examples is not None:
        size = f"{plan.global_batch:,} {examples.noun}"
    reasons = {each.key: each.reason for each in planned.defaults}
    reason = reasons.get("train.batch", "")
    by_default = " (by default)" if reasons.keys() & {"train.batch", "train.sequence"} else ""
    by_default = f" ({reason})" if "does not fit" in reason else by_default
    return (
        f"{size}{by_default}: micro-batch {plan.batch.micro} × "
        f"{plan.batch.accumulation} accumulated × DP {plan.parallel.data}"
    )


def _layers(plan: Plan) -> str:
    """`bfloat16 with float32 masters, compiled; recompute none; nothing offloaded`."""
    parts = [plan.precision + " with float32 masters" * plan.has_master_weights]
    if plan.stack is None:
        parts[0] += ", compiled" if plan.compile else ", eager"
    phases = max(len(stage.phases) for stage in plan.stages)
    if phases > 1:
        tier = plan.offload.parameters
        parts.append(f"{phases} phases, weights streamed from {tier}, layers recomputed")
        return "; ".join(parts)
    layers = "" if plan.recompute == "none" else f" ({describe_recompute(plan)})"
    parts.append(f"recompute {plan.recompute}{layers}")
    tiers = ", ".join(f"{name} to {tier}" for name, tier in plan.offload_tiers.items())
    parts.append(f"offload {tiers or 'none'}")
    return "; ".join(parts)


def _speed(prediction: Prediction, plan: Plan, device: str) -> str:
    """`3.56 s (80 %: 2.78 s to 4.55 s), 9.20 k tokens/s/GPU, MFU 55.9 %`."""
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    rate = format_count(prediction.tokens_per_second / plan.parallel.devices)
    return (
        f"{format_seconds(prediction.step_seconds)} (80 %: {low} to {high}), {rate} "
        f"{prediction.unit or 'tokens'}/s/{device}, MFU {100 * prediction.mfu:.1f} %"
    )


def _memory(planned: api.Planned) -> str:
    """`51.1 GiB of 69.0 GiB a device (80 %: to 52.6 GiB); chance to run out below 1 %`."""
    (device, *others), request = planned.prediction.peaks, planned.request
    capacity = request.memory or device.capacity_bytes
    words = f"{format_bytes(device.peak_bytes)} of {format_bytes(capacity)}"
    words += f" (80 %: to {format_bytes(device.high_bytes)})" if device.error else ""
    for peak in others:
        if peak.peak_bytes:
            words += f", {format_bytes(peak.peak_bytes)} of {peak.tier}"
    words += f" a device; {_chance(device, request)}"
    if request.margin and not _is_roomy(device, request):
        words += f"; no plan leaves the margin of {100 * request.margin:.3g} %"
    return words


def _bound(prediction: Prediction) -> str:
    """`bound by matrix products: matmul 59 % of a step, attention 25 %, traffic 12 %`."""
    terms = sorted(prediction.by_term.items(), key=lambda item: -item[1])[:_TERMS_SHOWN]
    shares = [f"{name} {100 * seconds / prediction.step_seconds:.0f} %" for name, seconds in terms]
    first = terms[0][0]
    return f"bound by {_BOUNDS.get(first, first)}: of a step {', '.join(shares)}"


def _next(planned: api.Planned) -> str:
    """The one change that saves most, as far as a request can name it."""
    result = planned.result
    rank, larger = result.pinned_rank, result.larger_batch
    if rank is not None and rank.best is not None and rank.plan is not None:
        lost = rank.best.slower_seconds / (rank.best.run_seconds - rank.best.slower_seconds)
        return (
            f"leave the pins open: {parallel_degrees(rank.plan)} with micro-batch "
            f"{rank.plan.batch.micro}; this one is {100 * lost:.1f} % slower"
        )
    if larger is not None:
        change = " ".join(larger.overrides)
        return f"`{change}`, twice the batch: {-100 * larger.cost:.1f} % less time a token"
    rest = [
        f"; a 10 % better {name} saves {100 * share:.1f} %"
        for name, share in result.sensitivity.items()
    ]
    return f"twice the batch saves below 1 %{''.join(rest[:1])}"


def _fastest(fastest: RunnerUp, planned: api.Planned) -> str:
    """The proved fastest plan, and why it is not the one to queue."""
    share = -fastest.slower_seconds / (fastest.run_seconds - fastest.slower_seconds)
    device, margin = fastest.prediction.peaks[0], planned.request.margin
    why = f"but not on links {100 * margin:.3g} % slower"
    if not _is_roomy(device, planned.request):
        peak = f"{format_bytes(device.peak_bytes)} (80 %: to {format_bytes(device.high_bytes)})"
        why = f"but {peak} leave no {100 * margin:.3g} %; {_chance(device, planned.request)}"
    return (
        f"proved {100 * share:.1f} % faster: {parallel_degrees(fastest.plan)}, micro-batch "
        f"{fastest.plan.batch.micro}, {why}; `--margin 0` takes it"
    )


def _is_roomy(device: TierPeak, request: ResolvedRequest) -> bool:
    """Whether the upper end of a peak's interval leaves the margin of the memory."""
    limit = request.memory or device.capacity_bytes * (1 - request.margin)
    return device.high_bytes <= limit + 1  # both ends are rounded


def _chance(device: TierPeak, request: ResolvedRequest) -> str:
    chance = device.overrun_chance(request.memory or device.capacity_bytes)
    return f"chance to run out {'below 1' if chance < 0.01 else f'{100 * chance:.0f}'} %"
