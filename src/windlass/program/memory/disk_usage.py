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

    @property
    def needed_bytes(self) -> int:
        """State and checkpoints together."""
        return self.state_bytes + self.checkpoints * self.checkpoint_bytes


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
    its end no checkpoint does. A checkpoint with frozen weights is a copy.

    Args:
        plan: a plan with one stage.
        graph: the plan's full graph.
        settings: how often a run saves, and how many checkpoints it keeps.
        steps_done: steps done before the run continues.
        checkpoints_present: checkpoints that exist already.
    """
    saves = (
        checkpoints_present
        + -(-settings.steps // settings.save_every)
        - steps_done // settings.save_every
    )
    in_files = plan.is_offloaded("optimizer") and plan.offload.optimizer != HOST_TIER
    links_state = in_files and not graph.has_frozen
    separate = saves - 1 if links_state else saves
    return DiskUsage(
        state_bytes=sum(
            sum(classes.values())
            for tier, classes in offloaded_bytes_by_tier(plan, graph).items()
            if tier != HOST_TIER
        ),
        checkpoint_bytes=_checkpoint_bytes(plan, graph),
        checkpoints=min(max(settings.keep, checkpoints_present) + 1, separate),
    )


def _checkpoint_bytes(plan: Plan, graph: Graph) -> int:
    """Bytes of the master weights and moments of all layers, and of their frozen weights."""
    sizes = plan_layer_sizes(plan, graph)
    weights = (each.frozen if plan.has_master_weights else each.weights for each in sizes)
    return sum(weights) + sum(layer.optimizer for layer in sizes)
