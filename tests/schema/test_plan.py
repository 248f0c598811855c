"""Plan: valid stages, and what follows from its fields."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from windlass.schema.plan import Batch, Offload, Parallelism, Plan, Stage

Phases = tuple[tuple[int, int], ...]


def plan(*stages: Phases, pipeline: int | None = None) -> Plan:
    return Plan(
        graph="tiny", machine="tiny", batch=Batch(sequence=8, micro=1),
        parallel=Parallelism(pipeline=pipeline or len(stages)),
        stages=tuple(Stage(phases=phases) for phases in stages),
    )  # fmt: skip


@given(ends=st.sets(st.integers(1, 40), min_size=1, max_size=6), data=st.data())
def test_stages_that_follow_each_other_make_a_plan(ends: set[int], data: st.DataObject):
    ranges = list(pairwise([0, *sorted(ends)]))
    border = data.draw(st.integers(1, len(ranges)))
    stages = [tuple(ranges[:border]), *[(one,) for one in ranges[border:]]]
    made = plan(*stages)
    assert made.stages[0].first_layer == 0
    assert made.stages[-1].end_layer == max(ends)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([((1, 3),)], r"stage 0 has phase \[1, 3\) where one from 0 is due"),
        ([((0, 0),)], r"stage 0 has phase \[0, 0\)"),
        ([((0, 2),), ((3, 4),)], r"stage 1 has phase \[3, 4\) where one from 2 is due"),
        ([((0, 2),), ((1, 4),)], r"stage 1 has phase \[1, 4\) where one from 2 is due"),
        ([((0, 2), (1, 3))], r"stage 0 has phase \[1, 3\) where one from 2 is due"),
        ([()], "at least 1"),
    ],
)
def test_stages_with_a_gap_or_an_overlap_are_refused(stages: list[Phases], reason: str):
    with pytest.raises(ValidationError, match=reason):
        plan(*stages)


def test_a_plan_has_a_stage_for_each_pipeline_rank():
    with pytest.raises(ValidationError, match=r"1 stages for `parallel.pipeline` = 2"):
        plan(((0, 2),), pipeline=2)


def test_a_number_of_recomputed_layers_needs_a_recompute_mode():
    assert Stage(phases=((0, 3),), recompute="full", recompute_layers=2).recompute_layers == 2
    with pytest.raises(ValidationError, match="`recompute_layers` = 2 with `recompute` = none"):
        Stage(phases=((0, 3),), recompute_layers=2)


def test_a_number_of_recomputed_layers_is_written_only_if_it_is_set():
    made = plan(((0, 3),))
    assert "recompute_layers" not in made.to_toml()
    counted = made.model_copy(
        update={"stages": (Stage(phases=((0, 3),), recompute="full", recompute_layers=1),)}
    )
    assert Plan.model_validate_json(counted.to_json()) == counted
    assert counted.label != made.label


@given(
    micro=st.integers(1, 9), accumulation=st.integers(1, 9), replicas=st.integers(1, 9),
    sequence=st.integers(1, 99),
)  # fmt: skip
def test_tokens_of_a_step_are_those_of_all_micro_batches_of_all_replicas(
    micro: int, accumulation: int, replicas: int, sequence: int
):
    made = tiny_plan(
        tiny_graph(), tiny_machine(),
        micro=micro, accumulation=accumulation, data=replicas, sequence=sequence,
    )  # fmt: skip
    tokens = sum(sequence * micro for _ in range(replicas) for _ in range(accumulation))
    assert made.tokens_per_step == tokens


def test_a_plan_survives_its_file(tmp_path: Path):
    made = tiny_plan(tiny_graph(layers=4), tiny_machine(devices=2), pipeline=2)
    made.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == made
    assert Plan.load(tmp_path / "plan.toml").label == made.label


def test_bfloat16_has_master_weights_and_sums_gradients_in_float32():
    made = [
        tiny_plan(tiny_graph(), tiny_machine(), precision=precision, accumulation=accumulation)
        for precision, accumulation in (("float32", 1), ("bfloat16", 1), ("bfloat16", 2))
    ]
    assert [
        (plan.parameter_itemsize, plan.gradient_itemsize, plan.optimizer_bytes_per_parameter)
        for plan in made
    ] == [(4, 4, 8), (2, 2, 12), (2, 4, 12)]


@pytest.mark.parametrize(
    ("home", "clip", "streamed", "deferred"),
    [
        (Offload(), True, False, False),
        (Offload(optimizer="disk"), True, True, False),
        (HOST_OFFLOAD, True, True, True),
        (HOST_OFFLOAD, False, True, False),
    ],
)
def test_updates_are_deferred_if_gradients_are_offloaded_and_a_norm_is_needed(
    home: Offload, clip: bool, streamed: bool, deferred: bool
):
    made = tiny_plan(tiny_graph(), tiny_machine(), offload=home, clip=clip)
    assert (made.offloads, made.defers_updates) == (streamed, deferred)
    assert made.is_offloaded("optimizer") == ("optimizer" in made.offload_tiers) == streamed
