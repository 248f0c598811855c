"""Which device does what: stage, slice and replica of each device and back, and layers of a stage.

A stage of the pipeline is one device's part of it. Where a plan interleaves, that is several chunks
of layers: `plan.stages` lists the chunks of all stages in the order of the chain, and chunk k is on
stage `k mod p`.
"""

from typing import NamedTuple

from windlass.schema.plan import Parallelism, Plan


class MeshCoord(NamedTuple):
    """A device's coordinates in the cut."""

    stage: int
    tensor_rank: int
    data_rank: int


def mesh_coord(rank: int, parallel: Parallelism) -> MeshCoord:
    """The coordinates of a device: slices lie next to each other, then replicas, then stages.

    Slices exchange most and stages least, so the fastest links join the slices.
    """
    rest, slice_ = divmod(rank, parallel.tensor)
    stage, replica = divmod(rest, parallel.data)
    return MeshCoord(stage, slice_, replica)


def rank_of(coord: MeshCoord, parallel: Parallelism) -> int:
    """The device at these coordinates."""
    return (coord.stage * parallel.data + coord.data_rank) * parallel.tensor + coord.tensor_rank


def chunks_of_stage(plan: Plan, stage: int) -> tuple[int, ...]:
    """The indices in `plan.stages` of a stage's chunks, first to last; one if none interleave."""
    return tuple(range(stage, len(plan.stages), plan.parallel.pipeline))


def layers_of_stage(plan: Plan, stage: int) -> tuple[int, ...]:
    """The layers of a stage, ascending."""
    return tuple(
        layer
        for chunk in chunks_of_stage(plan, stage)
        for layer in range(plan.stages[chunk].first, plan.stages[chunk].last)
    )


def stages_by_layer(plan: Plan) -> tuple[int, ...]:
    """The stage of each layer that the plan covers."""
    return tuple(
        chunk % plan.parallel.pipeline
        for chunk, part in enumerate(plan.stages)
        for _ in range(part.first, part.last)
    )
