"""Wording of plans, predictions and numbers, shared by terminal tables and HTML pages."""

import math
from collections.abc import Sequence

from windlass.program import MeshCoord, describe_degrees, describe_recompute, runtime_gaps
from windlass.schema import (
    MAX_CONTENTION,
    ChosenDefault,
    Graph,
    Parallelism,
    Plan,
    Prediction,
    SparseSpeedup,
    Step,
)
from windlass.stacks import load_stack, stack_names
from windlass.units import format_bytes, format_count, format_flop, format_flop_rate, format_seconds

MFU_FORMULA = "model FLOP of a step / (step time × dense peak FLOP/s)"


def describe_graph(graph: Graph) -> str:
    """`gpt-tiny: 3.4 M parameters in 8 layers, vocabulary 4096`."""
    size = (
        f"{graph.name}: {format_count(graph.parameter_count)} parameters in {graph.layers} layers"
    )
    if graph.examples is None:
        return f"{size}, vocabulary {graph.vocabulary}"
    shape = " × ".join(map(str, graph.examples.inputs))
    outputs = "classes" if graph.examples.numbers is None else "numbers"
    return f"{size}, {graph.examples.noun} of {shape} to {graph.vocabulary} {outputs}"


def describe_batch(plan: Plan, graph: Graph | None = None) -> str:
    """`16 sequences of 256 tokens a step, in 4 micro-batches of 4`, or `16 images a step, ...`."""
    count, micro = plan.batch.accumulation, plan.batch.micro
    split = f"in {count} micro-batches of {micro}" if count > 1 else "in one micro-batch"
    replicas = f" on each of {plan.parallel.data} replicas" if plan.parallel.data > 1 else ""
    if graph is not None and graph.examples is not None:
        return f"{plan.global_batch} {graph.examples.noun} a step, {split}{replicas}"
    sequences = f"{plan.global_batch} sequence{'s' if plan.global_batch > 1 else ''}"
    return f"{sequences} of {plan.batch.sequence} tokens a step, {split}{replicas}"


def describe_defaults(defaults: Sequence[ChosenDefault]) -> str:
    """`train.batch=16 train.steps=400 (why)`: values that a request left open, by their reason."""
    by_reason: dict[str, list[str]] = {}
    for default in defaults:
        by_reason.setdefault(default.reason, []).append(f"{default.key}={default.value}")
    return "; ".join(f"{' '.join(values)} ({reason})" for reason, values in by_reason.items())


def describe_parallelism(plan: Plan) -> str:
    """`one device`, or `pipeline 8 × data 4 = 32 devices`."""
    if plan.parallel.devices == 1:
        return "one device"
    degrees = (
        ("pipeline", plan.parallel.pipeline),
        ("tensor", plan.parallel.tensor),
        ("context", plan.parallel.context or 1),
        ("data", plan.parallel.data),
    )
    product = " × ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    experts = plan.parallel.expert
    divided = f", experts divided over {experts} replicas" if experts else ""
    return f"{product} = {plan.parallel.devices} devices{divided}"


def parallel_degrees(plan: Plan) -> str:
    """`describe_degrees`, then ` optimizer on host` if the optimizer state alone is offloaded."""
    degrees = describe_degrees(plan)
    if offloads_only_optimizer(plan):
        degrees += f" {describe_optimizer_offload(plan)}"
    return degrees


def offloads_only_optimizer(plan: Plan) -> bool:
    """Whether the optimizer state is offloaded and the parameters stay in device memory."""
    return plan.is_offloaded("optimizer") and not plan.is_offloaded("parameters")


def describe_optimizer_offload(plan: Plan) -> str:
    """`optimizer on host`: the tier of the optimizer state."""
    return f"optimizer on {plan.offload.optimizer}"


def describe_sharding(plan: Plan) -> str:
    """`parameters replicated; optimizer state sharded over 4 replicas (ZeRO-1)`."""
    return "; ".join(sharding_clauses(plan))


def sharding_clauses(plan: Plan) -> tuple[str, ...]:
    """What is sharded or replicated: parameters, then optimizer state; one clause for both of FSDP.

    FSDP shards the optimizer state with the parameters: that is no ZeRO-1 beside it.
    """
    parameters, optimizer = plan.sharding.parameters, plan.sharding.optimizer
    if parameters == optimizer > 1:
        again = ", parameters gathered for each pass" if plan.sharding.reshard else ""
        return (f"parameters and optimizer state sharded over {parameters} replicas (FSDP){again}",)
    degrees = (("parameters", "FSDP", parameters), ("optimizer state", "ZeRO-1", optimizer))
    return tuple(
        f"{name} sharded over {degree} replicas ({method})" if degree > 1 else f"{name} replicated"
        for name, method, degree in degrees
    )


def describe_coord(coord: MeshCoord, parallel: Parallelism) -> str:
    """`stage 1, replica 0`: the coordinates along the dimensions larger than one."""
    parts = (
        (parallel.pipeline, f"stage {coord.stage}"),
        (parallel.tensor, f"tensor rank {coord.tensor_rank}"),
        (parallel.data, f"replica {coord.data_rank}"),
    )
    return ", ".join(words for degree, words in parts if degree > 1)


def describe_stack(plan: Plan) -> str | None:
    """The stack that a plan is for, and what Windlass's own runtime lacks; None for its own."""
    if plan.stack is None:
        return None
    if _engine(plan) is not None:
        return f"{plan.stack}, by which `train` runs this plan"
    gaps = runtime_gaps(plan)
    if not gaps:
        return f"{plan.stack}; Windlass's own runtime has this parallelism too, and other times"
    lacks = " and no ".join(gaps)
    return f"{plan.stack}; Windlass's own runtime cannot run this plan yet: it has no {lacks}"


def _engine(plan: Plan) -> str | None:
    """The engine of Windlass that trains the plans of a stack; None if there is none."""
    return load_stack(plan.stack).engine if plan.stack in stack_names() and plan.stack else None


def describe_precision(plan: Plan) -> str:
    """`bfloat16 with float32 master weights, lion, moments in int8, compiled`."""
    masters = " with float32 master weights" if plan.has_master_weights else ""
    masters += " rounded stochastically" if plan.master_weights is False else ""
    moments = f", {plan.optimizer}" if plan.optimizer else ""
    moments += "" if plan.moments == "float32" else f", moments in {plan.moments}"
    moments += "" if plan.ema is None else ", averaged weights beside them"
    mode = "compiled" if plan.compile else "run eagerly"
    if plan.stack is not None and _engine(plan) is None:
        mode = f"in kernels of {plan.stack}"
    mode += ", deterministic kernels only" if plan.deterministic else ""
    mode += ", steps recorded and replayed" if plan.step_graph else ""
    return f"{plan.precision}{masters}{moments}, {mode}"


def describe_sections(plan: Plan, graph: Graph | None) -> str:
    """What runs as a section, whose intermediate results never exist whole; empty if nothing does.

    Args:
        graph: the plan's full graph; None tells of its layers nothing.
    """
    # A tensor-parallel rank runs its layers one by one.
    kinds = graph.kinds.values() if graph is not None and plan.parallel.tensor == 1 else ()
    ops = [op.name for kind in kinds for cost in kind.costs[:1] for op in cost.forward]
    sections = ["the loss with its projection to the vocabulary"] if plan.loss else []
    if any(name.startswith("block_feed_forward") for name in ops):
        sections.append("each sparse feed-forward")
    return ", ".join(sections)


def describe_plan_recompute(plan: Plan) -> str:
    """Which layers are recomputed in the backward pass."""
    if plan.is_offloaded("parameters"):
        return "recomputes the layers of all phases but the last"
    return describe_recompute(plan)


def describe_phases(plan: Plan) -> str:
    """The number of phases of the stage with most, and the tier of what is offloaded."""
    phases = plan.phase_count
    if phases > 1:
        return (
            f"{phases} phases in turn, weights and optimizer state offloaded to "
            f"{plan.offload.parameters}"
        )
    if plan.is_offloaded("optimizer"):
        return (
            f"all layers in memory at once, optimizer state offloaded to {plan.offload.optimizer}"
        )
    return "all layers in memory at once"


def describe_traffic(prediction: Prediction) -> str:
    """The bytes that a step offloads and loads back, and whether compute hides the transfers."""
    traffic = prediction.offload
    if traffic is None:
        return "nothing is offloaded"
    read, written = format_bytes(traffic.read_bytes), format_bytes(traffic.written_bytes)
    tokens = f"{format_count(prediction.tokens_per_step)} {prediction.unit or 'tokens'}"
    speed = f"{100 * prediction.offload_efficiency:.0f} % of the speed without offload"
    balance = format_count(prediction.tokens_to_hide_offload)
    return (
        f"{read} read and {written} written a step; at {tokens} {speed}; transfers take as "
        f"long as compute at {balance} {prediction.unit or 'tokens'} a step"
    )


def describe_writes(plan: Plan, prediction: Prediction, steps: int) -> str:
    """`2.10 GiB a step to disk, 840 GiB over 400 steps`."""
    if prediction.offload is None:
        return "nothing to an offload tier"
    tiers = " and ".join(dict.fromkeys(plan.offload_tiers.values()))
    written = prediction.offload.written_bytes
    total = f"{format_bytes(written * steps)} over {steps} step{'s' if steps > 1 else ''}"
    return f"{format_bytes(written)} a step to {tiers}, {total}"


def describe_plan(plan: Plan, graph: Graph | None = None) -> str:
    """The plan in one sentence, without the full stop."""
    stack = describe_stack(plan)
    return "; ".join(
        (
            *(() if stack is None else (f"for {stack}",)),
            describe_parallelism(plan),
            describe_batch(plan, graph),
            describe_precision(plan),
            describe_plan_recompute(plan),
            describe_phases(plan),
        )
    )


def format_ratio(ratio: float | None) -> str:
    """`1.04 ×`, or a dash where there is no ratio."""
    return "–" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f} ×"


def describe_contention(share: float | None) -> str:
    """`the machine was busy: threads waited 38 % of the time`; empty if it was idle or unknown."""
    if share is None or share <= MAX_CONTENTION:
        return ""
    return f"the machine was busy: threads waited {100 * share:.0f} % of the time"


def describe_dropped(step: Step) -> str:
    """`2.1 % of choices dropped`, by experts without room; empty without a capacity."""
    share = step.dropped_share
    return "" if share is None else f"{100 * share:.1f} % of choices dropped"


def describe_loss_scale(steps: Sequence[Step]) -> str:
    """`32768; 1 of 400 steps skipped, as gradients overflowed`; empty if no loss is scaled."""
    scale = steps[-1].loss_scale
    if scale is None:
        return ""
    skipped = sum(math.isnan(step.gradient_norm) for step in steps)
    count = f"{skipped} of {len(steps)} steps" if len(steps) > 1 else "the step"
    return f"{scale:g}" + (f"; {count} skipped, as gradients overflowed" if skipped else "")


def describe_speedup(speedup: SparseSpeedup) -> str:
    """`2.61 × the same plan with dense weights (10.1 s a step); Amdahl's limit is 3.10 ×, ...`."""
    dense = format_seconds(speedup.dense_seconds)
    return (
        f"{speedup.speedup:.2f} × the same plan with dense weights ({dense} a step); Amdahl's "
        f"limit is {speedup.limit:.2f} ×, if sparse products run at the rate of dense ones"
    )


def format_mfu(prediction: Prediction, seconds: float) -> str:
    """`41.2 % = 56.1 GFLOP / (333 ms × 410 GFLOP/s)`."""
    share = prediction.model_flop / (seconds * prediction.peak_flop_rate)
    return (
        f"{100 * share:.1f} % = {format_flop(prediction.model_flop)} / "
        f"({format_seconds(seconds)} × {format_flop_rate(prediction.peak_flop_rate)})"
    )


def format_speed(tokens_per_second: float, unit: str | None = None) -> str:
    """`12.3 k tokens/s`, or `images/s` of a model that takes images."""
    return f"{format_count(tokens_per_second)} {unit or 'tokens'}/s"


def format_loss(loss: float) -> str:
    """`3.402`, or `not finite`."""
    return f"{loss:.3f}" if math.isfinite(loss) else "not finite"


def format_task_scores(step: Step) -> str:
    """`capitals acc 0.750, acc_norm 0.500; texts bits_per_byte 1.204`; empty without scores."""
    tasks: dict[str, list[str]] = {}
    for name, value in step.task_scores.items():
        task, _, metric = name.rpartition(".")
        tasks.setdefault(task, []).append(f"{metric} {value:.3f}")
    return "; ".join(f"{task} {', '.join(metrics)}" for task, metrics in tasks.items())


def format_held_out_loss(step: Step) -> str:
    """`3.402 (1.920 bits per byte), 3.391 averaged`, or of classes `0.102 (97.1 % right)`.

    With a sentence head it is `4.021 (1.920 bits per byte, 71.4 % of pairs right)`, and
    `not measured` if the step did not evaluate.
    """
    if step.held_out_loss is None:
        return "not measured"
    bits, accuracy = step.held_out_bits_per_byte, step.held_out_accuracy
    parts = [] if bits is None else [f"{bits:.3f} bits per byte"]
    if accuracy is not None:
        of_pairs = "" if step.held_out_sentence_loss is None else "of pairs "
        parts.append(f"{100 * accuracy:.1f} % {of_pairs}right")
    more = f" ({', '.join(parts)})" if parts else ""
    averaged = step.held_out_loss_ema
    more += f", {format_loss(averaged)} averaged" if averaged is not None else ""
    return format_loss(step.held_out_loss) + more
