"""Writes a published run as a plan under the software stack that ran it."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil

from windlass.capture import image_graph, split_blocks, stack_graph
from windlass.cost import ArrayClock, PlanColumns, predict_time
from windlass.models import TransformerConfig
from windlass.schema import (
    Batch,
    Graph,
    Machine,
    Offload,
    Parallelism,
    Plan,
    ShardingDegrees,
    Stack,
    Stage,
)
from windlass.stacks import load_stack
from windlass.validation.csv_table import UnusableRow
from windlass.validation.published_run import ModelShape, PublishedRun, RunConfig, image_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """A published run as a plan, with the graph and the machine that it names."""

    plan: Plan
    graph: Graph
    machine: Machine


def published_plan(
    run: PublishedRun, config: RunConfig, stack: Stack | None = None
) -> PublishedPlan:
    """The plan of a run in one of the configurations that its row may mean.

    Args:
        stack: its software, with other constants than the file's; None takes the file's.

    Raises:
        UnusableRow: the configuration contradicts itself.
    """
    cluster = run.cluster
    stack = stack or load_stack(cluster.stack)
    # Transformer Engine's overlap has 8-bit factors (its #1711), and none of 4 bits was found.
    overlaps = config.async_tensor_parallel or (cluster.overlaps and not config.float4)
    if stack.tensor_overlap and not overlaps:
        stack = stack.model_copy(update={"tensor_overlap": 0.0})
    if stack.sequence_parallel and not config.sequence_parallel:
        stack = stack.model_copy(update={"sequence_parallel": False})
    if config.fp32_gradients:  # beside the 16-bit ones
        memory = stack.memory.model_copy(update={"gradient_bytes": 2.0})
        sums = {"gradient_sums": "separate", "reduce_bytes": None, "memory": memory}
        stack = stack.model_copy(update=sums)
    machine = cluster.machine(run.family, round(config.devices), run.per_host).model_copy(
        update={"stack": stack}
    )
    graph = _graph_of(run, config, stack)
    plan = _plan(run, config, graph, machine)
    if cluster.streams:
        plan = _streamed(plan, graph, machine)
    return PublishedPlan(plan=plan, graph=graph, machine=machine)


def step_seconds(published: PublishedPlan) -> float:
    """Predicted seconds of a published run's step.

    The array clock prices it, or the event simulator if weights stream through the device.

    Raises:
        KeyError: the machine states no rate or link that the plan needs.
    """
    plan, graph, machine = published.plan, published.graph, published.machine
    if plan.is_offloaded("parameters"):
        return predict_time(plan, graph, machine).step_seconds
    return float(ArrayClock(plan, graph, machine).step_seconds(PlanColumns.of([plan]))[0])


def _graph_of(run: PublishedRun, config: RunConfig, stack: Stack) -> Graph:
    image = image_model(run.model)
    if image is not None:
        return image_graph(image)
    model = transformer_config(run.model, run.shape)
    degree, share = round(config.tensor), run.shape.head_position_share
    adapter = round(run.shape.adapter) or None
    return _graph(model, stack, degree, share, adapter, bool(config.stage_halves))


@lru_cache(maxsize=4096)
def _graph(
    config: TransformerConfig, stack: Stack, tensor: int, share: float, adapter: int | None,
    halves: bool,
) -> Graph:  # fmt: skip
    graph = stack_graph(config, stack, (tensor,), predicted_share=share, adapter=adapter)
    return split_blocks(graph) if halves else graph


def transformer_config(name: str, shape: ModelShape) -> TransformerConfig:
    """The transformer of a shape."""
    gated = shape.ffn_matrices > 2
    return TransformerConfig(
        name=name,
        layers=round(shape.layers),
        width=round(shape.width),
        heads=round(shape.heads),
        kv_heads=max(1, round(shape.heads * shape.kv_head_share)),
        head_dim=round(shape.head_width) or None,
        sliding_window=round(shape.window) or None,
        window_blocks=(True, False) if shape.window else (True,),
        latent=shape.latent,
        experts=shape.experts,
        ffn=round(shape.ffn_width),
        vocabulary=round(shape.vocabulary),
        sequence=round(shape.sequence),
        norm="rms" if gated else "layer",
        positions="rotary" if gated else "learned",
        activation="swiglu" if gated else "gelu_tanh",
        causal=shape.head_position_share == 1.0,
        attention_bias=not gated,
        ffn_bias=not gated,
        tied_embeddings=shape.vocabulary_matrices == 1.0,
    )


def _plan(run: PublishedRun, config: RunConfig, graph: Graph, machine: Machine) -> Plan:
    pipeline, virtual = round(config.pipeline), round(config.virtual_stages)
    context = round(config.context)
    replicas = round(config.replicas) * context
    shards = replicas if config.zero >= 1 else 1
    parameters = replicas if config.zero >= 3 else 1
    accumulation = max(1, round(config.accumulation))
    if virtual > 1 and accumulation % pipeline:
        raise UnusableRow(f"{accumulation} micro-batches are no multiple of {pipeline} stages")
    return Plan(
        graph=graph.label,
        machine=machine.name,
        stack=None if machine.stack is None else machine.stack.name,
        step_graph=True if run.cluster.records else None,
        precision=config.narrow or machine.device.half_precision,
        parallel=Parallelism(
            pipeline=pipeline,
            tensor=round(config.tensor),
            data=round(config.replicas),
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual_stages=virtual,
            context=context if context > 1 else None,
            expert=round(config.expert) if config.expert > 1 else None,
        ),
        sharding=ShardingDegrees(
            parameters=parameters,
            optimizer=shards,
            reshard=True if parameters > 1 and pipeline == 1 else None,
        ),
        batch=Batch(
            sequence=round(run.shape.sequence),
            micro=max(1, round(config.micro)),
            accumulation=accumulation,
        ),
        offload=_offload(config, machine),
        stages=tuple(
            Stage(phases=(part,), recompute=config.recompute)
            for part in _parts(graph.layers, pipeline * virtual, config)
        ),
    )


def _offload(config: RunConfig, machine: Machine) -> Offload:
    if not config.optimizer_off_chip:
        return Offload()
    return Offload(optimizer=machine.device.tiers[-1].name)


def _streamed(plan: Plan, graph: Graph, machine: Machine) -> Plan:
    """The plan with the whole batch as one micro-batch, through one layer after the other."""
    tier = machine.device.tiers[-1].name
    batch = plan.batch.model_copy(
        update={"micro": plan.batch.sequences_per_replica, "accumulation": 1}
    )
    return plan.model_copy(
        update={
            "batch": batch,
            "offload": Offload(parameters=tier, gradients=tier, optimizer=tier),
            "stages": (Stage(phases=tuple((layer, layer + 1) for layer in range(graph.layers))),),
        }
    )


def _parts(layers: int, chunks: int, config: RunConfig) -> list[tuple[int, int]]:
    """Layers of each model chunk: blocks evenly, filled from the first on; then the head.

    If embedding and head count as one layer each, first and last chunk have a block less. They do
    where there are more chunks than blocks.
    """
    if layers == 1:
        return [(0, 1)]
    blocks = layers - 2
    if config.stage_halves:
        bounds = [0, *(1 + end for end in accumulate(config.stage_halves))]
        bounds[-1] = layers
    elif config.balanced_embedding or blocks < chunks:
        full = ceil(layers / chunks)
        bounds = [*(min(layers, full * at) for at in range(chunks)), layers]
    else:
        full = ceil(blocks / chunks)
        counts = [max(0, min(full, blocks - full * at)) for at in range(chunks)]
        if min(counts) == 0:
            counts = [blocks // chunks + (at < blocks % chunks) for at in range(chunks)]
        bounds = [0, *(1 + end for end in accumulate(counts))]
        bounds[-1] = layers
    parts = list(pairwise(bounds))
    if any(end <= first for first, end in parts):
        raise UnusableRow(f"{blocks} blocks in {chunks} model chunks leave one without a layer")
    return parts
