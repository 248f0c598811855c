"""Room: what a run takes of the disk under its folder, at the fullest moment."""

from dataclasses import dataclass

from windlass.program.memory.layer_sizes import plan_layer_sizes
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.schema.graph import Graph
from windlass.schema.plan import HOST_TIER, Plan
from windlass.schema.request import TrainRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Bytes on the disk, when there are most."""

    state_bytes: int
    """What lives in files beyond the near tier; 0 of a run that keeps all in memory."""
    checkpoint_bytes: int
    """Of one checkpoint."""
    checkpoints: int
    """That hold bytes of their own at that moment."""

    @property
    def needed_bytes(self) -> int:
        """All together."""
        return self.state_bytes + self.checkpoints * self.checkpoint_bytes


def disk_usage(plan: Plan, graph: Graph, settings: TrainRequest, *, steps_done: int = 0, checkpoints_present: int = 0) -> DiskUsage:
    """The room that a run needs: `state + checkpoints x checkpoint`.

    A checkpoint is whole before the oldest one goes, so `keep + 1` are there together. Where the
    state lies in files, one gives them a second name: it takes room of its own from the next
    update on, which writes beside. So the last one never does, and of a run that saves only at its
    end no checkpoint does.

    Args:
        plan: of one stage.
        graph: that it cuts.
        settings: how often a run saves, and how many checkpoints stay.
        done: steps that the run has done before it goes on.
        kept: checkpoints that are there already.
    """
    saves = checkpoints_present + -(-settings.steps // settings.save_every) - steps_done // settings.save_every
    linked = plan.is_offloaded("optimizer") and plan.offload.optimizer != HOST_TIER
    apart = saves - 1 if linked else saves
    return DiskUsage(
        state_bytes=sum(
            sum(classes.values())
            for tier, classes in offloaded_bytes_by_tier(plan, graph).items()
            if tier != HOST_TIER
        ),
        checkpoint_bytes=_checkpoint_bytes(plan, graph),
        checkpoints=min(max(settings.keep, checkpoints_present) + 1, apart),
    )


def _checkpoint_bytes(plan: Plan, graph: Graph) -> int:
    """Masters and moments of all weights."""
    sizes = plan_layer_sizes(plan, graph)
    masters = sum(each.weights for each in sizes) if not plan.has_master_weights else 0
    return masters + sum(each.optimizer for each in sizes)
