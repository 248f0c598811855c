"""Room: what a run takes of the disk under its folder, at the fullest moment."""

from dataclasses import dataclass

from windlass.program.far import far_bytes
from windlass.program.sizes import sizes_of
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan
from windlass.spec.request import TrainRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes on the disk, when there are most."""

    state_bytes: int
    """What lives beyond the near tier; 0 of a run that keeps all near."""
    checkpoint_bytes: int
    """Of one checkpoint."""
    checkpoints: int
    """That hold bytes of their own at that moment."""

    @property
    def needed_bytes(self) -> int:
        """All together."""
        return self.state_bytes + self.checkpoints * self.checkpoint_bytes


def room(plan: Plan, graph: Graph, settings: TrainRequest) -> Room:
    """The room that a run needs: `state + checkpoints x checkpoint`.

    A checkpoint is whole before the oldest one goes, so `keep + 1` are there together. One of a
    streamed run gives the state's files a second name: it takes room of its own from the next
    update on, which writes beside. So the last one never does, and of a run that saves only at its
    end no checkpoint does.

    Args:
        plan: of one stage.
        graph: that it cuts.
        settings: how often a run saves, and how many checkpoints stay.
    """
    saves = -(-settings.steps // settings.save_every)
    apart = saves - 1 if plan.streamed else saves
    return Room(
        state_bytes=sum(sum(classes.values()) for classes in far_bytes(plan, graph).values()),
        checkpoint_bytes=_checkpoint_bytes(plan, graph),
        checkpoints=min(settings.keep + 1, apart),
    )


def _checkpoint_bytes(plan: Plan, graph: Graph) -> int:
    """Masters and moments of all weights."""
    sizes = sizes_of(plan, graph)
    masters = sum(each.weights for each in sizes) if not plan.masters_apart else 0
    return masters + sum(each.optimizer for each in sizes)
