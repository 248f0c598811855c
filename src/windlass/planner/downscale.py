"""Downscales a plan until it runs on this machine, with its structure kept.

Pipeline stages, tensor and data parallelism, sharding, phases, schedule and recompute stay; with
too many devices each degree is divided, down to two at the least. Widths, heads and the vocabulary
become tiny, and a stage keeps its layers up to a limit. Whatever an error in communication would
corrupt is still there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd, lcm, prod

from windlass.models import TransformerConfig
from windlass.schema import (
    DEVICE_TIER,
    Batch,
    ModelRequest,
    Offload,
    Parallelism,
    Plan,
    ShardingDegrees,
    Stage,
    grid_columns,
    grid_rows,
    tensor_degree,
)

STAGE_LAYERS = 8
"""Most layers that a stage keeps, embedding and head included."""

_MIN_LAYERS = 3
"""Embedding, one block and head."""
_MAX_VIRTUAL_STAGES = 2
_MAX_MICROBATCH, _MICROBATCHES_PER_STAGE = 2, 2
"""Largest micro-batch in sequences, and micro-batches for each stage, which fill the pipeline."""
_HEAD_WIDTH, _HEADS = 8, 4
_VOCABULARY = 259
"""Holds all bytes and is divisible by no degree, so that its shards differ in size."""
_TOKENS = 16
_POSITIONS = 8
"""Positions for each tensor-parallel rank: a rank's shard is captured with up to five tokens."""
_DROPOUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DownscaledPlan:
    """A small plan for a small model of the same family."""

    model: ModelRequest
    plan: Plan
    """The small plan, with the large one's labels."""
    notes: tuple[str, ...]
    """Changes, one sentence each."""


def downscale_plan(
    plan: Plan, shape: TransformerConfig, *, devices: int, tiers: tuple[str, ...]
) -> DownscaledPlan:
    """A small plan of the same structure.

    Args:
        plan: a plan of any size, for any machine.
        shape: configuration of its model; the small model is of the same family.
        devices: most devices that the small plan may take.
        tiers: names of the offload tiers on this machine.
    """
    parallel = divided_parallelism(plan.parallel, devices)
    chunks = min(plan.parallel.virtual_stages, _MAX_VIRTUAL_STAGES)
    stages, stage_note = _stages(plan, parallel.pipeline * chunks)
    batch = _batch(plan, parallel)
    sharding = ShardingDegrees(
        parameters=_sharding_degree(plan.sharding.parameters, parallel.data),
        optimizer=_sharding_degree(plan.sharding.optimizer, parallel.data),
    )
    offload = _offload(plan.offload, tiers)
    model = _model(shape, plan.parallel.tensor, parallel.tensor, stages[-1].end_layer - 2)
    small = Plan.model_validate(
        plan.model_dump()
        | {
            "parallel": parallel.model_copy(
                update={"schedule": plan.parallel.schedule, "virtual_stages": chunks}
            ),
            "stages": stages, "batch": batch,
            "sharding": sharding, "offload": offload, "compile": False,
        }
    )  # fmt: skip
    changes = (
        *_plan_changes(plan, small),
        stage_note,
        _model_changes(shape, model),
        _tier_changes(plan.offload, offload),
    )
    return DownscaledPlan(model=model, plan=small, notes=tuple(note for note in changes if note))


def divided_parallelism(parallel: Parallelism, devices: int) -> Parallelism:
    """Parallel degrees on at most this many devices: the largest one is divided repeatedly.

    Among equal degrees the data-parallel one is divided first, then the tensor-parallel one (rows
    of a grid before its columns), then the pipeline's. No degree above 1 becomes 1 unless there are
    too few devices otherwise.
    """
    degrees = {
        "data": parallel.data,
        "rows": grid_rows(parallel.tensor),
        "columns": grid_columns(parallel.tensor),
        "pipeline": parallel.pipeline,
    }
    while prod(degrees.values()) > devices:
        name = max(degrees, key=lambda degree: degrees[degree])
        degrees[name] = _next_divisor(degrees[name])
    return Parallelism(
        pipeline=degrees["pipeline"],
        tensor=tensor_degree(degrees["rows"], degrees["columns"]),
        data=degrees["data"],
    )


def _next_divisor(degree: int) -> int:
    """The largest proper divisor; 2 for a larger prime number, and 1 for 2."""
    divisor = max(n for n in range(1, degree) if degree % n == 0)
    return divisor if divisor > 1 else min(2, degree - 1)


def _stages(plan: Plan, count: int) -> tuple[tuple[Stage, ...], str]:
    """This many of a plan's stages, including the first and the last, with fewer layers each."""
    before = len(plan.stages)
    last = before - 1
    chosen = [
        last * position // max(1, count - 1) if count > 1 else last for position in range(count)
    ]
    end, stages = 0, []
    for index in chosen:
        stage = plan.stages[index]
        phases = []
        for size in _phase_layers([b - a for a, b in stage.phases]):
            phases.append((end, end + size))
            end += size
        layers = _recompute_layers(stage, phases[-1])
        rest = None if layers is None else stage.recompute_rest
        changes = {"phases": tuple(phases), "recompute_layers": layers, "recompute_rest": rest}
        stages.append(stage.model_copy(update=changes))
    if end < _MIN_LAYERS:
        first, _ = stages[-1].phases[-1]
        grown = (*stages[-1].phases[:-1], (first, _MIN_LAYERS))
        stages[-1] = stages[-1].model_copy(update={"phases": grown})
    note = "" if count == before else f"stages {', '.join(map(str, chosen))} stand for all {before}"
    return tuple(stages), note


def _recompute_layers(stage: Stage, phase: tuple[int, int]) -> int | None:
    """Recomputed layers of a small stage; at least one that could be recomputed is not."""
    some = phase[1] - phase[0] - 2  # embedding and head, if there, are never recomputed
    return None if stage.recompute_layers is None or some < 1 else min(stage.recompute_layers, some)


def _phase_layers(layers: list[int]) -> list[int]:
    """Layers of each phase, at most `STAGE_LAYERS` in all."""
    layers = layers[:STAGE_LAYERS]
    total = sum(layers)
    if total <= STAGE_LAYERS:
        return layers
    return [max(1, count * STAGE_LAYERS // total) for count in layers]


def _batch(plan: Plan, parallel: Parallelism) -> Batch:
    accumulation = min(plan.batch.accumulation, _MICROBATCHES_PER_STAGE * parallel.pipeline)
    if plan.parallel.schedule == "interleaved":
        accumulation = max(1, accumulation // parallel.pipeline) * parallel.pipeline
    sequence = max(_TOKENS, 2 * parallel.tensor)
    return Batch(
        sequence=sequence // parallel.tensor * parallel.tensor,
        micro=min(plan.batch.micro, _MAX_MICROBATCH),
        accumulation=accumulation,
    )


def _sharding_degree(degree: int, replicas: int) -> int:
    """A sharding degree that divides the replicas; all replicas if none but 1 does."""
    common = gcd(degree, replicas)
    return common if common > 1 or degree == 1 else replicas


def _offload(offload: Offload, tiers: tuple[str, ...]) -> Offload:
    """The same offload with every unknown tier replaced by one of this machine."""
    missing = [name for name, tier in offload if tier != DEVICE_TIER and tier not in tiers]
    return offload.model_copy(update=dict.fromkeys(missing, tiers[-1]) if tiers else {})


def _model(shape: TransformerConfig, degree_before: int, tensor: int, blocks: int) -> ModelRequest:
    """A small model that can be sharded over this many tensor-parallel ranks.

    Args:
        degree_before: its tensor-parallel degree. If only the grid's rows divide its heads, so do
            the small model's.
    """
    heads, key_heads, columns = max(_HEADS, 2 * tensor), max(2, tensor), grid_columns(tensor)
    if columns > 1 and shape.heads % degree_before:
        heads, key_heads = grid_rows(tensor) * (columns + 1), grid_rows(tensor)
    width = heads * lcm(_HEAD_WIDTH, columns)
    grouped_query = shape.kv_heads < shape.heads
    ffn = tensor * max(1, round(shape.ffn * width / shape.width / tensor))
    return ModelRequest(
        name=shape.name,
        layers=max(1, blocks),
        width=width,
        heads=heads,
        kv_heads=key_heads if grouped_query else None,
        ffn=ffn,
        vocabulary=_VOCABULARY,
        sequence=max(3 * _TOKENS, _POSITIONS * tensor),
        dropout=_DROPOUT,
    )


def _plan_changes(plan: Plan, small: Plan) -> Iterable[str]:
    """A note for each number of the plan that has changed."""
    numbers: dict[str, Callable[[Plan], int]] = {
        "parallel.pipeline": lambda p: p.parallel.pipeline,
        "parallel.tensor": lambda p: p.parallel.tensor,
        "parallel.data": lambda p: p.parallel.data,
        "parallel.virtual_stages": lambda p: p.parallel.virtual_stages,
        "sharding.parameters": lambda p: p.sharding.parameters,
        "sharding.optimizer": lambda p: p.sharding.optimizer,
        "batch.micro": lambda p: p.batch.micro,
        "batch.accumulation": lambda p: p.batch.accumulation,
        "batch.sequence": lambda p: p.batch.sequence,
        "layers": lambda p: p.stages[-1].end_layer,
    }
    for name, number in numbers.items():
        if number(plan) != number(small):
            yield f"`{name}` {number(plan)} -> {number(small)}"


def _model_changes(shape: TransformerConfig, model: ModelRequest) -> str:
    return (
        f"width {shape.width} -> {model.width}, heads {shape.heads} -> {model.heads}, vocabulary "
        f"{shape.vocabulary} -> {model.vocabulary}, dropout {shape.dropout:g} -> {model.dropout:g}"
    )


def _tier_changes(offload: Offload, downscaled: Offload) -> str:
    pairs = zip(offload, downscaled, strict=True)
    moved = {f"{tier} -> {now}" for (_, tier), (_, now) in pairs if tier != now}
    return f"offload tiers {', '.join(sorted(moved))}" if moved else ""
