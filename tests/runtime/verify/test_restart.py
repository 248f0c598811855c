"""Runs that stop after a step and go on from its checkpoint, in one process."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from windlass.data.batches import Batches
from windlass.errors import RunInterrupted
from windlass.models.layer_stack import LayerStack
from windlass.runtime.checkpoint.async_saver import AsyncSaver
from windlass.runtime.checkpoint.checkpoint import Checkpoint, Manifest
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.runtime.verify.restart import train_with_restart
from windlass.schema.plan import Plan
from windlass.schema.run_record import Step
from windlass.schema.train_request import TrainSettings

Loop = Callable[[Checkpoint | None, Callable[[], bool]], Generator[Step]]


@pytest.fixture
def loop(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], object],
    settings: Callable[..., TrainSettings],
    batches: Callable[..., Batches],
    folder: Path,
) -> Loop:
    """A run of three steps in float64 that saves after each."""

    def start(checkpoint: Checkpoint | None, stop: Callable[[], bool]) -> Generator[Step]:
        stack = gpt(device="meta", dropout=0.1)
        three_steps = plan(stack, precision="float64")
        context = RankContext(
            plan=three_steps, stack=stack, program=program(three_steps),
            settings=settings(save_every=1), checkpoints=folder,
        )  # fmt: skip
        return train_loop(context, batches(), resume=checkpoint, stop=stop)

    return start


def test_a_run_that_stops_and_goes_on_yields_the_steps_of_one_that_does_not(
    loop: Loop, gpt: Callable[..., LayerStack], folder: Path
):
    whole = [(step.step, step.loss, step.held_out_loss) for step in loop(None, lambda: False)]
    starts: list[int | None] = []

    def start(checkpoint: Checkpoint | None, stop: Callable[[], bool]) -> Generator[Step]:
        starts.append(checkpoint.manifest.step if checkpoint else None)
        return loop(checkpoint, stop)

    steps = train_with_restart(
        start, gpt(device="meta"), folder.parent, after=2, stop=lambda: False
    )
    assert [(step.step, step.loss, step.held_out_loss) for step in steps] == whole
    assert starts == [None, 2]


def test_a_stop_after_a_step_that_is_saved_does_not_save_it_again(
    loop: Loop, gpt: Callable[..., LayerStack], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    saved: list[int] = []
    begin = AsyncSaver.begin

    def count(saver: AsyncSaver, manifest: Manifest) -> str:
        saved.append(manifest.step)
        return begin(saver, manifest)

    monkeypatch.setattr(AsyncSaver, "begin", count)
    stack = gpt(device="meta")
    list(train_with_restart(loop, stack, folder.parent, after=2, stop=lambda: False))
    assert saved == [1, 2, 3]


def test_a_run_that_is_told_to_stop_does_not_start_again(
    loop: Loop, gpt: Callable[..., LayerStack], folder: Path
):
    done: list[int] = []
    steps = train_with_restart(
        loop, gpt(device="meta"), folder.parent, after=2, stop=lambda: len(done) == 1
    )
    with pytest.raises(RunInterrupted):
        done.extend(step.step for step in steps)
    assert done == [1]
