"""Plans, formulas and ratios in words, the same on the terminal and on the page."""

import math

from windlass.program import activation_checkpointing as recompute
from windlass.program.device_mesh import MeshCoord
from windlass.schema.graph import Graph
from windlass.schema.plan import Parallelism, Plan
from windlass.schema.prediction import Prediction
from windlass.schema.run_record import Step
from windlass.units import format_bytes, format_count, format_flop, format_flop_rate, format_seconds

MFU_FORMULA = "model FLOP of a step / (step time × dense peak FLOP/s)"


def describe_graph(graph: Graph) -> str:
    """`gpt-tiny: 3.4 M parameters in 8 layers, vocabulary 4096`."""
    return (
        f"{graph.name}: {format_count(graph.parameter_count)} parameters in {graph.layers} layers, "
        f"vocabulary {graph.vocabulary}"
    )


def describe_batch(plan: Plan) -> str:
    """`16 sequences of 256 tokens a step, in 4 micro-batches of 4`."""
    count, micro = plan.batch.accumulation, plan.batch.micro
    pieces = f"in {count} micro-batches of {micro}" if count > 1 else "in one micro-batch"
    replicas = f" on each of {plan.parallel.data} replicas" if plan.parallel.data > 1 else ""
    sequences = f"{plan.global_batch} sequence{'s' if plan.global_batch > 1 else ''}"
    return f"{sequences} of {plan.batch.sequence} tokens a step, {pieces}{replicas}"


def describe_parallelism(plan: Plan) -> str:
    """`one device`, or `8 pipeline stages × 4 replicas = 32 devices`."""
    if plan.parallel.devices == 1:
        return "one device"
    degrees = (
        (plan.parallel.pipeline, "pipeline stages"),
        (plan.parallel.tensor, "tensor slices"),
        (plan.parallel.data, "replicas"),
    )
    product = " × ".join(f"{count} {name}" for count, name in degrees if count > 1)
    return f"{product} = {plan.parallel.devices} devices"


def parallel_degrees(plan: Plan) -> str:
    """`p8 t8 r4`, and ` rts 2 rts' 4` where replicas share weights or optimizer state.

    And ` state on host` where only that lives away.
    """
    cut, sharding = plan.parallel, plan.sharding
    words = [f"p{cut.pipeline} t{cut.tensor} r{cut.data}"]
    words += [f"rts {sharding.parameters}"] if sharding.parameters > 1 else []
    words += [f"rts' {sharding.optimizer}"] if sharding.optimizer > 1 else []
    words += [describe_optimizer_offload(plan)] if offloads_only_optimizer(plan) else []
    return " ".join(words)


def offloads_only_optimizer(plan: Plan) -> bool:
    """Whether optimizer state alone lives beyond the near tier."""
    return plan.is_offloaded("optimizer") and not plan.is_offloaded("parameters")


def describe_optimizer_offload(plan: Plan) -> str:
    """`state on host`: where optimizer state lives."""
    return f"state on {plan.offload.optimizer}"


def describe_sharding(plan: Plan) -> str:
    """Who shares weights (rts) and optimizer state (rts')."""
    names = (
        ("weights (rts)", plan.sharding.parameters),
        ("optimizer state (rts')", plan.sharding.optimizer),
    )
    return "; ".join(
        f"{count} replicas share {name}" if count > 1 else f"each replica has all {name}"
        for name, count in names
    )


def describe_coord(place: MeshCoord, cut: Parallelism) -> str:
    """`stage 1, replica 0`: what the cut has more than one of."""
    parts = (
        (cut.pipeline, f"stage {place.stage}"),
        (cut.tensor, f"slice {place.tensor_rank}"),
        (cut.data, f"replica {place.data_rank}"),
    )
    return ", ".join(words for count, words in parts if count > 1)


def describe_precision(plan: Plan) -> str:
    """`bfloat16 with float32 master weights, moments in int8, compiled`."""
    masters = " with float32 master weights" if plan.has_master_weights else ""
    moments = "" if plan.moments == "float32" else f", moments in {plan.moments}"
    mode = "compiled" if plan.compile else "run eagerly"
    return f"{plan.precision}{masters}{moments}, {mode}"


def describe_recompute(plan: Plan) -> str:
    """What is computed twice."""
    if plan.is_offloaded("parameters"):
        return "recomputes the layers of all phases but the last"
    return recompute.describe_recompute(plan)


def describe_phases(plan: Plan) -> str:
    """In how many phases the fullest stage runs."""
    most = max(len(stage.phases) for stage in plan.stages)
    if most > 1:
        return f"{most} in turn, weights and state at home on {plan.offload.parameters}"
    if plan.is_offloaded("optimizer"):
        return f"all layers in memory at once, optimizer state on {plan.offload.optimizer}"
    return "all layers in memory at once"


def describe_traffic(prediction: Prediction) -> str:
    """What moves in a step, and whether the computing hides it."""
    far = prediction.offload
    if far is None:
        return "nothing moves between tiers"
    moved = (
        f"{format_bytes(far.read_bytes)} read and {format_bytes(far.written_bytes)} written a step"
    )
    share = f"{100 * prediction.offload_efficiency:.0f} % of the speed without it"
    tokens = format_count(prediction.tokens_to_hide_offload)
    law = f"moving takes as long as computing at {tokens} tokens a step"
    return f"{moved}; at {format_count(prediction.tokens_per_step)} tokens {share}; {law}"


def describe_writes(plan: Plan, prediction: Prediction, steps: int) -> str:
    """`writes 2.1 GiB a step to disk, 840 GiB over 400 steps`."""
    if prediction.offload is None:
        return "writes nothing beyond memory"
    tiers = " and ".join(dict.fromkeys(plan.offload_tiers.values()))
    written = prediction.offload.written_bytes
    run = f"{format_bytes(written * steps)} over {steps} step{'s' if steps > 1 else ''}"
    return f"writes {format_bytes(written)} a step to {tiers}, {run}"


def describe_plan(plan: Plan) -> str:
    """The plan in one sentence, without its full stop."""
    return "; ".join(
        (
            describe_parallelism(plan),
            describe_batch(plan),
            describe_precision(plan),
            describe_recompute(plan),
            describe_phases(plan),
        )
    )


def format_ratio(ratio: float | None) -> str:
    """`1.04 ×`, or a dash."""
    return "–" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f} ×"


def format_mfu(prediction: Prediction, seconds: float) -> str:
    """`41.2 % = 56.1 GFLOP / (333 ms × 410 GFLOP/s)`."""
    share = prediction.model_flop / (seconds * prediction.peak_flop_rate)
    return (
        f"{100 * share:.1f} % = {format_flop(prediction.model_flop)} / "
        f"({format_seconds(seconds)} × {format_flop_rate(prediction.peak_flop_rate)})"
    )


def format_speed(tokens_per_second: float) -> str:
    """`12.3 k tokens/s`."""
    if tokens_per_second < 1000:
        return f"{tokens_per_second:.3g} tokens/s"
    return f"{format_count(tokens_per_second)} tokens/s"


def format_loss(loss: float) -> str:
    """A loss with the digits that mean something; `no number` where it is none."""
    return f"{loss:.3f}" if math.isfinite(loss) else "no number"


def format_held_out_loss(step: Step) -> str:
    """`3.402 (1.920 bits per byte)`; `not measured` of a step that did not evaluate."""
    if step.held_out_loss is None:
        return "not measured"
    bits = step.held_out_bits_per_byte
    more = f" ({bits:.3f} bits per byte)" if bits is not None else ""
    return format_loss(step.held_out_loss) + more
