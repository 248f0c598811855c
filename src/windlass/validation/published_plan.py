"""Writes a published run as a plan under the software stack that ran it."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil

from windlass.capture import stack_graph
from windlass.models import TransformerConfig
from windlass.schema import (
    Batch,
    Graph,
    Machine,
    Parallelism,
    Plan,
    Recompute,
    ShardingDegrees,
    Stack,
    Stage,
)
from windlass.stacks import load_stack
from windlass.validation.csv_table import UnusableRow
from windlass.validation.published_run import ModelShape, PublishedRun, RunConfig
from windlass.validation.clusters import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """A published run as a plan, with the graph and the machine that it names."""

    plan: Plan
    graph: Graph
    machine: Machine


def published_plan(
    run: PublishedRun,
    config: RunConfig,
    cluster: Cluster,
    family: str,
    stack: Stack | None = None,
) -> PublishedPlan:
    """The plan of a run in one of the configurations that its row may mean.

    Args:
        run: the run.
        config: one of its configurations.
        cluster: the cluster that it ran on.
        family: host family of its machine.
        stack: its software, with other constants than the file's; None takes the file's.

    Raises:
        UnusableRow: the configuration contradicts itself.
    """
    stack = stack or load_stack(cluster.stack)
    machine = cluster.machine(family, round(config.devices), run.per_host).model_copy(
        update={"stack": stack}
    )
    model = transformer_config(run.model, run.shape)
    graph = _graph(model, stack, round(config.tensor), run.shape.head_position_share)
    return PublishedPlan(plan=_plan(run, config, graph, machine), graph=graph, machine=machine)


@lru_cache(maxsize=4096)
def _graph(config: TransformerConfig, stack: Stack, tensor: int, share: float) -> Graph:
    return stack_graph(config, stack, tensor, predicted_share=share)


def transformer_config(name: str, shape: ModelShape) -> TransformerConfig:
    """The transformer of a shape."""
    gated = shape.ffn_matrices > 2
    return TransformerConfig(
        name=name,
        layers=round(shape.layers),
        width=round(shape.width),
        heads=round(shape.heads),
        kv_heads=max(1, round(shape.heads * shape.kv_head_share)),
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
        precision="float8" if config.float8 else "bfloat16",
        parallel=Parallelism(
            pipeline=pipeline,
            tensor=round(config.tensor),
            data=round(config.replicas),
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual_stages=virtual,
            context=context if context > 1 else None,
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
        stages=tuple(
            Stage(phases=(part,), recompute=_recompute(config))
            for part in _parts(graph.layers, pipeline * virtual, config)
        ),
    )


def _recompute(config: RunConfig) -> Recompute:
    if config.recompute_share == 1:
        return "full"
    return "selective" if config.recompute_share or config.selective_recompute else "none"


def _parts(layers: int, chunks: int, config: RunConfig) -> list[tuple[int, int]]:
    """Layers of each model chunk: blocks evenly, filled from the first on; then the head.

    If embedding and head count as one layer each, first and last chunk have a block less.

    Raises:
        UnusableRow: a chunk would have no layer.
    """
    blocks = layers - 2
    if config.balanced_embedding:
        full = ceil(layers / chunks)
        bounds = [*(min(layers, full * at) for at in range(chunks)), layers]
    else:
        full = ceil(blocks / chunks)
        counts = [max(0, min(full, blocks - full * at)) for at in range(chunks)]
        if blocks % chunks and min(counts) < full - 1:  # the last chunks would be nearly empty
            counts = [blocks // chunks + (at < blocks % chunks) for at in range(chunks)]
        bounds = [0, *(1 + end for end in accumulate(counts))]
        bounds[-1] = layers
    parts = list(pairwise(bounds))
    if any(end <= first for first, end in parts):
        raise UnusableRow(f"{blocks} blocks in {chunks} model chunks leave one without a layer")
    return parts
