"""Device mesh: the pipeline stage, tensor-parallel and data-parallel rank of each global rank.

A pipeline stage is one device's part of the pipeline. With interleaving it consists of several
model chunks: `plan.stages` lists the chunks of all stages in layer order, and chunk k is on stage
`k mod p`.
"""

from typing import NamedTuple

from windlass.schema import Parallelism, Plan


class MeshCoord(NamedTuple):
    """A device's coordinates in the device mesh."""

    stage: int
    tensor_rank: int
    data_rank: int


def mesh_coord(rank: int, parallel: Parallelism) -> MeshCoord:
    """The coordinates of a global rank.

    Tensor-parallel ranks are adjacent, then come replicas, then stages. Tensor-parallel ranks
    communicate most and stages least, so tensor parallelism gets the fastest links.
    """
    group, tensor_rank = divmod(rank, parallel.tensor)
    stage, data_rank = divmod(group, parallel.replicas)
    return MeshCoord(stage, tensor_rank, data_rank)


def rank_of(coord: MeshCoord, parallel: Parallelism) -> int:
    """The global rank at these coordinates."""
    return (coord.stage * parallel.replicas + coord.data_rank) * parallel.tensor + coord.tensor_rank


def chunks_of_stage(plan: Plan, stage: int) -> tuple[int, ...]:
    """The indices in `plan.stages` of a stage's model chunks, ascending."""
    return tuple(range(stage, len(plan.stages), plan.parallel.pipeline))


def layers_of_stage(plan: Plan, stage: int) -> tuple[int, ...]:
    """The layers of a stage, ascending."""
    return tuple(
        layer
        for chunk in chunks_of_stage(plan, stage)
        for layer in range(plan.stages[chunk].first_layer, plan.stages[chunk].end_layer)
    )


def stages_by_layer(plan: Plan) -> tuple[int, ...]:
    """The stage of each layer that the plan covers."""
    return tuple(
        index % plan.parallel.pipeline
        for index, chunk in enumerate(plan.stages)
        for _ in range(chunk.first_layer, chunk.end_layer)
    )


def describe_degrees(plan: Plan) -> str:
    """`PP=8 TP=8 DP=4`, then ` CP=2`, ` EP=4`, ` FSDP=2` and ` ZeRO-1=4` where there are any.

    FSDP shards the optimizer state too, so ZeRO-1 is named only where its degree differs.
    """
    parallel, sharding = plan.parallel, plan.sharding
    parts = [f"PP={parallel.pipeline} TP={parallel.tensor} DP={parallel.data}"]
    if parallel.context:
        parts.append(f"CP={parallel.context}")
    if parallel.expert:
        parts.append(f"EP={parallel.expert}")
    if sharding.parameters > 1:
        parts.append(f"FSDP={sharding.parameters}")
    if sharding.optimizer not in (1, sharding.parameters):
        parts.append(f"ZeRO-1={sharding.optimizer}")
    return " ".join(parts)
