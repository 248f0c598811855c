"""Peak device memory from counts of sizes, against the program instruction by instruction."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cost.batched.test_evaluate_batch import (
    BESIDE,
    FAST_LINKS,
    GRAPHS,
    WITH_HOSTS,
    draw,
    draw_again,
    told,
)
from windlass.cost.batched.memory.live_microbatches import peak_moments
from windlass.cost.batched.schedule_index import BACKWARD, FORWARD, PipelineShape
from windlass.cost.peak_memory import tier_peaks
from windlass.program.lowering.lower import lower
from windlass.program.pipeline_schedules import schedule_passes
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan, Stage

ROUNDING = 1e-12
"""Relative error of sums of floats; the bytes themselves are equal."""


def cut_anywhere(plan: Plan, graph: Graph, chance: random.Random) -> Plan:
    """The plan with its chunks cut anywhere."""
    ends = sorted(chance.sample(range(1, graph.layers), len(plan.stages) - 1))
    bounds = pairwise([0, *ends, graph.layers])
    stages = tuple(Stage(phases=(pair,), recompute=plan.recompute) for pair in bounds)
    return plan.model_copy(update={"stages": stages})


def clocked(plan: Plan, graph: Graph) -> int:
    """Bytes at the fullest instruction of the fullest stage."""
    return tier_peaks(plan, graph, FAST_LINKS, lower(plan, graph))[0].peak_bytes


@pytest.mark.parametrize("seed", range(3))
def test_stage_peaks_are_those_of_the_fullest_instruction(seed: int):
    chance = random.Random(seed)
    for _ in range(60):
        graph = chance.choice(GRAPHS)
        plan = cut_anywhere(draw(chance, graph, FAST_LINKS), graph, chance)
        said = told(plan, graph, FAST_LINKS).peak_bytes[0]
        assert said == pytest.approx(clocked(plan, graph), rel=ROUNDING)


def test_so_are_stage_peaks_with_any_recompute_and_offloaded_state():
    chance = random.Random(7)
    for _ in range(100):
        graph, machine = chance.choice(GRAPHS), chance.choice((*WITH_HOSTS, *BESIDE))
        plan = draw_again(chance, graph, machine)
        said = told(plan, graph, machine).peak_bytes[0]
        wanted = tier_peaks(plan, graph, machine, lower(plan, graph))[0].peak_bytes
        assert said == pytest.approx(wanted, rel=ROUNDING)


SHAPES = st.builds(
    lambda order, stages, chunks, micros: (
        PipelineShape.of(order, stages, chunks, micros * stages)
        if order == "interleaved"
        else PipelineShape.of(order, stages, 1, micros)
    ),
    st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]),
    st.integers(2, 9),
    st.integers(2, 5),
    st.integers(1, 12),
)


@given(shape=SHAPES, sizes=st.lists(st.integers(0, 50), min_size=5, max_size=5))
def test_no_pass_of_a_schedule_holds_more_than_its_peak_moments(
    shape: PipelineShape, sizes: list[int]
):
    """Passes forward and the first parts of backward ones; chunks have any sizes."""
    each = np.array(sizes[: shape.virtual_stages])
    found = peak_moments(shape, tuple(range(shape.pipeline)))
    held = (found.open + found.waiting) @ each + each[found.chunk]
    micros = shape.settled if shape.repeats else shape.microbatches
    for stage, kind in [(at, kind) for at in range(shape.pipeline) for kind in (FORWARD, BACKWARD)]:
        own = (found.stage == stage) & (found.kind == kind)
        told = held[own].max()
        assert told == fullest_of(shape._replace(microbatches=micros), stage, kind, each)


def fullest_of(shape: PipelineShape, stage: int, kind: int, sizes: np.ndarray) -> int:
    """The most that a stage holds at passes of a kind, taken one after the other."""
    now = most = 0
    for turn in schedule_passes(
        shape.schedule, shape.pipeline, stage, shape.microbatches, chunks=shape.virtual_stages
    ):
        begins, ends = turn.kind == "forward", turn.kind in ("backward", "backward_weight")
        now += begins * sizes[turn.chunk]
        if begins if kind == FORWARD else turn.kind in ("backward", "backward_input"):
            most = max(most, now)
        now -= ends * sizes[turn.chunk]
    return most
