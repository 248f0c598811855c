"""Disk usage: the most that a run takes of the disk under its folder."""

from dataclasses import dataclass

from windlass.program.memory.layer_sizes import plan_layer_sizes
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.schema import HOST_TIER, Graph, Plan, TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Bytes on disk at the fullest moment of a run."""

    state_bytes: int
    """Model state offloaded to files; 0 if a run offloads none."""
    checkpoint_bytes: int
    """Size of one checkpoint."""
    checkpoints: int
    """Checkpoints that take space of their own at that moment."""
    shared_bytes: int = 0
    """Frozen weights that all checkpoints share, where the state in files has them not."""

    @property
    def needed_bytes(self) -> int:
        """State and checkpoints together."""
        return self.state_bytes + self.shared_bytes + self.checkpoints * self.checkpoint_bytes


def disk_usage(
    plan: Plan,
    graph: Graph,
    settings: TrainSettings,
    *,
    steps_done: int = 0,
    checkpoints_present: int = 0,
) -> DiskUsage:
    """The disk space that a run needs: `state + checkpoints x checkpoint`.

    A checkpoint is complete before the oldest one is deleted, so `keep + 1` exist together. Where
    the state is in files, a checkpoint is a hard link to them: it takes space of its own from the
    next update on, which writes new files. So the last one never does, and if a run saves only at
    its end no checkpoint does. Offloaded frozen weights are written once, and all checkpoints link
    to them; those of a run in device memory are copied into each. A base that
    is read where it stands takes nothing.

    Args:
        plan: a plan with one stage.
        steps_done: steps done before the run continues.
    """
    saves = (
        checkpoints_present
        + -(-settings.steps // settings.save_every)
        - steps_done // settings.save_every
    )
    in_files = plan.is_offloaded("optimizer") and plan.offload.optimizer != HOST_TIER
    separate = saves - 1 if in_files else saves
    state_bytes = sum(
        sum(classes.values())
        for tier, classes in offloaded_bytes_by_tier(plan, graph).items()
        if tier != HOST_TIER
    )
    frozen_bytes = sum(layer.frozen for layer in plan_layer_sizes(plan, graph))
    shares_frozen = plan.is_offloaded("optimizer")
    return DiskUsage(
        state_bytes=state_bytes,
        checkpoint_bytes=_trained_bytes(plan, graph) + (0 if shares_frozen else frozen_bytes),
        checkpoints=min(max(settings.keep, checkpoints_present) + 1, separate),
        shared_bytes=frozen_bytes if shares_frozen and not in_files else 0,
    )


def _trained_bytes(plan: Plan, graph: Graph) -> int:
    """Bytes of the master weights and moments of all layers."""
    sizes = plan_layer_sizes(plan, graph)
    masters = 0 if plan.has_master_weights else sum(each.weights - each.frozen for each in sizes)
    return masters + sum(layer.optimizer for layer in sizes)
