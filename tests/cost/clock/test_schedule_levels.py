"""Levels of passes against the schedules that they come from."""

import numpy as np
import pytest

from windlass.cost.clock.plan_columns import PipelineShape
from windlass.cost.clock.schedule_levels import EdgePass, schedule_levels, stage_passes

SHAPES = [
    PipelineShape("gpipe", 3, 1, 5),
    PipelineShape("1f1b", 1, 1, 3),
    PipelineShape("1f1b", 4, 1, 2),
    PipelineShape("1f1b", 4, 1, 9),
    PipelineShape("zero-bubble", 4, 1, 6),
    PipelineShape("interleaved", 2, 3, 6),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_levels_run_every_pass_of_a_stage_in_its_order(shape: PipelineShape):
    passes = stage_passes(shape)
    found: list[list[int]] = [[] for _ in range(shape.pipeline)]
    for level in schedule_levels(shape).levels:
        plain = np.arange(shape.pipeline)[level.stages].tolist()
        stages = plain + [edge.chunk % shape.pipeline for edge in level.edges]
        assert len(set(stages)) == len(stages)
        for stage, row in zip(plain, level.rows.tolist(), strict=True):
            found[stage].append(row % (3 * shape.chunks))
        for edge in level.edges:
            found[edge.chunk % shape.pipeline].append(edge.kind * shape.chunks + edge.chunk)
    for stage, rows in enumerate(found):
        kinds, chunks = passes.kinds[stage].tolist(), passes.chunks[stage].tolist()
        assert rows == [
            kind * shape.chunks + chunk for kind, chunk in zip(kinds, chunks, strict=True)
        ]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_slot_holds_one_message_at_a_time(shape: PipelineShape):
    plan, taken = schedule_levels(shape), set[int]()
    for level in plan.levels:
        edges: tuple[EdgePass, ...] = level.edges
        needed = [*level.needs.tolist(), *(edge.needs for edge in edges)]
        sent = [*level.sends.tolist(), *(edge.sends for edge in edges)]
        for slot in filter(None, needed):
            taken.remove(slot)
        for slot in filter(None, sent):
            assert slot not in taken
            assert slot < plan.slots
            taken.add(slot)
    assert not taken
