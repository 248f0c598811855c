"""Stops a training loop after a step and goes on from its checkpoint, as another process would."""

from collections.abc import Callable, Generator
from pathlib import Path

import torch.distributed as dist

from windlass.errors import RunInterrupted
from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import Checkpoint, checkpoint_name, open_checkpoint
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.schema import CHECKPOINT_FOLDER, Step

_MERGED_FOLDER = ".restart"
"""Folder in the run's folder for the merged checkpoint that all ranks go on from."""

StartLoop = Callable[[Checkpoint | None, Callable[[], bool]], Generator[Step]]
"""Starts the loop from a checkpoint, None for the beginning, with a new model and optimizer; it
ends once the function returns True."""


def train_with_restart(
    start: StartLoop, stack: LayerStack, folder: Path, *, after: int, stop: Callable[[], bool]
) -> Generator[Step]:
    """Yields the steps of a run that stops after a step, and starts again from its checkpoint.

    Args:
        after: step to stop after, which is not the last one.
        stop: asked before each micro-batch; True ends the run.

    Raises:
        RunInterrupted: `stop` returned True.
    """
    several = dist.is_initialized()
    # A device alone stops before a micro-batch, ranks of a group agree at the end of a step.
    stops_at = after - 1 if several else after
    done = 0

    def stops() -> bool:
        return done >= stops_at or stop()

    try:
        for step in start(None, stops):
            done = step.step
            yield step
    except RunInterrupted:
        if done < after or stop():
            raise
    yield from start(_saved_checkpoint(stack, folder, after, several=several), stop)


def _saved_checkpoint(stack: LayerStack, folder: Path, step: int, *, several: bool) -> Checkpoint:
    """The checkpoint of a step, its shards merged by rank 0."""
    checkpoint = open_checkpoint(folder / CHECKPOINT_FOLDER / checkpoint_name(step))
    if not several:
        return checkpoint
    merged = folder / _MERGED_FOLDER
    if not dist.get_rank():
        merge_shards(checkpoint, stack, merged)
    dist.barrier()
    return open_checkpoint(merged) if merged.exists() else checkpoint
