"""Any legal plan trains a model as a single device does, and sends the bytes of its program.

`pytest -m slow tests/runtime/distributed/test_distributed_training.py` runs the full grid of plans
on 1 to 8 processes, which takes about ten minutes on two cores.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from factories import tiny_plan
from program_bytes import sent_bytes_by_kind
from rank_pool import (
    BATCH,
    LAYERS,
    MACHINE,
    OFFLOADED,
    SEQUENCE,
    SETTINGS,
    CheckedPlans,
    RankPool,
    RankProcesses,
    divisors,
    legal,
    parallel_degrees,
    plans,
    slow,
)
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan

SAMPLED = 3
"""Plans of the default suite."""

DEVICES = Path("/proc/net/dev")

_OVERHEAD = 1.05
"""Allows for packet and gloo headers, acknowledgements, and the rendezvous. Other traffic of the
host counts too."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A Llama whose four blocks have eight experts each."""
    folder = tmp_path_factory.mktemp("experts")
    return RankPool(folder, 4, (2,), model="moe-tiny", width=96, processes=ranks)


@pytest.mark.parametrize("tensor", [slow(1), 2])
def test_two_ranks_that_divide_experts_equal_a_single_device(experts: RankPool, tensor: int):
    plan = tiny_plan(
        experts.graph, MACHINE, data=2, expert=2, tensor=tensor, micro=2, accumulation=2,
        sequence=SEQUENCE, precision="float64",
    )  # fmt: skip
    result, _ = experts.verify(plan)
    assert result.passed, result.first_mismatch


def test_every_legal_plan_equals_a_single_device_and_sends_the_bytes_of_its_program(
    pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = CheckedPlans()

    @settings(
        max_examples=SAMPLED,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(plans(pool.graph))
    def each(plan: Plan) -> None:
        checked.check(pool, plan)

    each()
    with capsys.disabled():
        print(f"\n{checked}")


@pytest.mark.parametrize(
    "degrees",
    [
        slow({"data": 4, "sharding": (1, 4)}),
        {"data": 4, "sharding": (2, 4)},
        slow({"data": 2, "sharding": (1, 2), "pipeline": 2}),
    ],
    ids=str,
)
def test_offloaded_optimizer_state_may_be_sharded_further_than_parameters(
    pool: RankPool, degrees: dict
) -> None:
    """BERT-Large ran like this on the IPU-POD16, with state in streaming memory, sharded by 4."""
    CheckedPlans().check(pool, offloaded_state_plan(pool, **degrees))


def offloaded_state_plan(pool: RankPool, **degrees: Any) -> Plan:  # noqa: ANN401  handed on to the factory
    """A plan with parameters in device memory and optimizer state on disk."""
    return tiny_plan(
        pool.graph, MACHINE, micro=1, accumulation=BATCH // degrees["data"], sequence=SEQUENCE,
        offload=Offload(optimizer="disk"), **degrees,
    )  # fmt: skip


def test_interleaved_stages_work_with_offloaded_optimizer_state(pool: RankPool) -> None:
    plan = offloaded_state_plan(
        pool, pipeline=2, data=2, sharding=(2, 2), schedule="interleaved", virtual_stages=2
    )
    CheckedPlans().check(pool, plan)


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline": 2, "virtual_stages": 3, "data": 2, "sharding": (2, 2)},
        {"pipeline": 2, "virtual_stages": 2, "tensor": 2, "offload": OFFLOADED[1]},
        slow({"pipeline": 3, "virtual_stages": 2, "clip": False}),
    ],
    ids=str,
)
def test_phases_that_span_all_stages_equal_a_single_device(pool: RankPool, degrees: dict) -> None:
    """GPT-3 175B was to run on 8 stages of a POD256 whose layers take turns on each device."""
    chunks = degrees["pipeline"] * degrees["virtual_stages"]
    ends = [round(chunk * LAYERS / chunks) for chunk in range(chunks + 1)]
    plan = tiny_plan(
        pool.graph, MACHINE, schedule="interleaved", micro=1, sequence=SEQUENCE,
        accumulation=BATCH // degrees.get("data", 1),
        stages=tuple(((begin, end),) for begin, end in pairwise(ends)),
        **{"offload": OFFLOADED[0], **degrees},
    )  # fmt: skip
    CheckedPlans().check(pool, plan)


def test_a_run_with_offloaded_sharded_state_resumes_bit_identically(pool: RankPool) -> None:
    plan = offloaded_state_plan(pool, data=2, sharding=(1, 2), tensor=2, clip=False)
    full = pool.run(plan)
    resumed = pool.run(plan, resume=pool.merged_checkpoint(full, 1))
    numbers = [(step.loss, step.gradient_norm) for step in resumed.steps]
    assert numbers == [(step.loss, step.gradient_norm) for step in full.steps[1:]]


def test_split_backward_works_with_sharded_parameters(pool: RankPool) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, pipeline=2, data=2, sharding=(2, 2), schedule="zero-bubble",
        micro=1, accumulation=4, sequence=SEQUENCE, precision="float64",
    )  # fmt: skip
    CheckedPlans().check(pool, plan)


@pytest.mark.slow
@pytest.mark.skipif(not DEVICES.exists(), reason="only Linux tells what a network device sent")
@pytest.mark.parametrize(
    "degrees",
    [{"pipeline": 2, "data": 2}, {"data": 4, "sharding": (2, 4)}, {"tensor": 2}],
    ids=["pipeline", "sharding", "tensor"],
)
def test_the_kernel_sends_slightly_more_bytes_than_the_program_says(
    tmp_path: Path, degrees: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    large = RankPool(tmp_path, 4, (2,), width=512)
    try:
        plan = tiny_plan(
            large.graph, MACHINE, micro=1, accumulation=BATCH // degrees.get("data", 1),
            sequence=SEQUENCE, **degrees,
        )  # fmt: skip
        settings = SETTINGS.model_copy(update={"evaluate_sequences": 0, "save_every": 3})
        large.run(plan, settings=settings)
        before = loopback_bytes()
        large.run(plan, settings=settings)
        sent = loopback_bytes() - before
    finally:
        large.close()
    ranks = range(plan.parallel.devices)
    expected = SETTINGS.steps * sum(
        sum(sent_bytes_by_kind(plan, large.graph, rank).values()) for rank in ranks
    )
    with capsys.disabled():
        print(f"\nthe kernel sent {sent / expected:.4f} times {expected} bytes")
    assert expected < sent < _OVERHEAD * expected


def loopback_bytes() -> int:
    """All bytes that the loopback device has sent."""
    line = next(line for line in DEVICES.read_text().splitlines() if "lo:" in line)
    return int(line.split()[9])


@pytest.mark.slow
def test_the_full_grid_of_plans_equals_a_single_device(
    wide_pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = CheckedPlans()
    for plan in grid(wide_pool.graph):
        checked.check(wide_pool, plan)
        if len(checked.plans) % 50 == 0:
            with capsys.disabled():
                print(f"\n{checked}")
    with capsys.disabled():
        print(f"\n{checked}")
    assert len(checked.plans) > 200


def grid(graph: Graph) -> Iterator[Plan]:
    """Every parallelism with every sharding, schedule and offload, on 1 to 8 devices.

    What interacts least with these (micro-batch, recompute, precision, clipping) alternates.
    """
    turn = 0
    for devices, offload in product((1, 2, 4, 8), (None, *OFFLOADED)):
        for degrees in parallel_degrees(devices, tuple(graph.tensor_shards)):
            for optimizer in divisors(degrees[2]):
                for parameters, schedule in product(
                    divisors(optimizer), ("gpipe", "1f1b", "zero-bubble", "interleaved")
                ):
                    turn += 1
                    plan = _grid_plan(
                        graph, turn, degrees, (parameters, optimizer), schedule, offload
                    )
                    if plan is not None and legal(plan, graph):
                        yield plan


def _grid_plan(
    graph: Graph,
    turn: int,
    degrees: tuple[int, int, int],
    sharding: tuple[int, int],
    schedule: str,
    offload: object,
) -> Plan | None:
    pipeline, tensor, data = degrees
    chunks = 2 if schedule == "interleaved" else 1
    if pipeline * chunks > LAYERS:
        return None
    micro = 1 + turn % 2 if BATCH // data > 1 else 1
    stages = None
    if offload is not None and chunks == 1:
        ends = [round(stage * LAYERS / pipeline) for stage in range(pipeline + 1)]
        stages = tuple(
            ((first, first + 1), (first + 1, last)) if last - first > 1 else ((first, last),)
            for first, last in pairwise(ends)
        )
    return tiny_plan(
        graph, MACHINE, pipeline=pipeline, tensor=tensor, data=data, micro=micro,
        accumulation=BATCH // data // micro, sequence=SEQUENCE, sharding=sharding,
        schedule=schedule, virtual_stages=chunks, offload=offload, stages=stages,
        recompute=("none", "full")[turn // 2 % 2],
        precision="float32" if offload is not None or turn % 5 == 0 else "float64",
    )  # fmt: skip
