"""Dependency levels of a pipeline's passes, for all schedules."""

from itertools import product

import numpy as np
import pytest

from windlass.cost.batched.pipeline.dependency_levels import dependency_levels
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.program.pipeline_schedules import schedule_passes

SHAPES = [
    *(
        PipelineShape(order, stages, 1, micros)
        for order, stages, micros in product(
            ("gpipe", "1f1b", "zero-bubble"), (1, 2, 3, 5), (1, 2, 3, 7, 12)
        )
    ),
    *(
        PipelineShape("interleaved", stages, chunks, stages * turns)
        for stages, chunks, turns in product((2, 3), (2, 4), (1, 2, 5))
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_message_keeps_its_slot_until_it_is_received(shape: PipelineShape):
    waiting: set[int] = set()
    levels = dependency_levels(shape)
    for level in levels.all:
        needs = {int(need) for need in level.needs if need}
        assert needs <= waiting
        waiting -= needs
        sends = {int(send) for send in level.sends}
        assert len(sends) == len(level.sends)
        assert not sends & waiting
        assert max(sends, default=0) < levels.places
        waiting |= sends
    assert not waiting


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_stage_runs_its_passes_in_the_order_of_the_schedule(shape: PipelineShape):
    """A row of the durations tells of a pass its kind and chunk, and whether it is the first's."""
    kinds = {"forward": 0, "backward": 1, "backward_input": 1, "backward_weight": 3}
    for stage in range(shape.pipeline):
        turns = schedule_passes(
            shape.schedule, shape.pipeline, stage, shape.microbatches, chunks=shape.virtual_stages
        )
        asked = [
            (kinds[kind] + (micro == 0 and kind != "forward")) * shape.chunks
            + chunk * shape.pipeline + stage
            for kind, micro, chunk in turns
        ]  # fmt: skip
        rows = [
            int(row)
            for level in dependency_levels(shape).all
            for row in level.rows[np.arange(shape.pipeline)[level.stages] == stage]
        ]
        assert rows == asked


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_of_the_settled_micro_batches_starts_like_a_longer_one(shape: PipelineShape):
    settled, longer = (
        dependency_levels(shape._replace(microbatches=micros))
        for micros in (shape.settled, shape.settled + shape.pipeline)
    )
    assert settled.places == longer.places
    together = longer.settled
    assert 0 < together < min(len(settled.all), len(longer.all))
    for one, other in zip(settled.all[:together], longer.all[:together], strict=True):
        assert str(one) == str(other)
    assert str(settled.all[together]) != str(longer.all[together])
