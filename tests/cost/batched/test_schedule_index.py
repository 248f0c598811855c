"""Passes by counts, against the schedules played one by one."""

from hypothesis import given, strategies as st

from windlass.cost.batched.schedule_index import ScheduleIndex
from windlass.program.pipeline_schedules import schedule_passes

KINDS = {"forward": 0, "backward": 1, "backward_input": 1, "backward_weight": 2}


def turns(order: str, stages: int, groups: int, chunks: int) -> ScheduleIndex:
    """An order that only interleaves by chunks, and only with as many micro-batches as it can."""
    if order != "interleaved":
        return ScheduleIndex(order, stages, 1, groups)  # type: ignore[arg-type]
    return ScheduleIndex(order, stages, chunks, groups * stages)


TURNS = st.builds(
    turns,
    st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]),
    st.integers(1, 6),
    st.integers(1, 14),
    st.integers(1, 4),
)


@given(turns=TURNS)
def test_counts_put_every_pass_where_the_schedule_has_it(turns: ScheduleIndex):
    found = turns.passes()
    for stage in range(turns.pipeline):
        asked = schedule_passes(
            turns.schedule, turns.pipeline, stage, turns.microbatches, chunks=turns.virtual_stages
        )
        told = zip(found.kinds[stage], found.micros[stage], found.chunks[stage], strict=True)
        assert list(told) == [(KINDS[kind], micro, chunk) for kind, micro, chunk in asked]
