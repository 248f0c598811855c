"""Any legal plan trains a model as a single device does, and sends the bytes of its program.

`pytest -m slow tests/runtime/distributed/test_distributed_training.py` runs the full grid of plans
on 1 to 8 processes, which takes about ten minutes on two cores.
"""

import json
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from factories import tiny_plan
from rank_pool import (
    BATCH,
    LAYERS,
    MACHINE,
    OFFLOADED,
    SEQUENCE,
    SETTINGS,
    RankPool,
    RankProcesses,
    divisors,
    legal,
    parallel_degrees,
    plans,
    sent_bytes,
)
from windlass.program.communication_volume import sent_bytes_by_kind
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.runtime.verify.fault_injection import FAULTS, faulty_layer
from windlass.schema.answers.verification import TOLERANCE
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan
from windlass.schema.tensor_grid import TensorGrid

SAMPLED = 4
"""Plans of the default suite."""

PRECISIONS = ("float64", pytest.param("float32", marks=pytest.mark.slow))
"""What is the same to 1e-9 is the same to a rounding of float32; drawn plans have both."""

slow = partial(pytest.param, marks=pytest.mark.slow)

GRIDS = (TensorGrid(2, 2), TensorGrid(4, 2), TensorGrid(2, 4), TensorGrid(1, 4))

WINDOWED = {
    "model_type": "gemma2", "num_hidden_layers": LAYERS - 2, "hidden_size": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 48,
    "vocab_size": 300, "max_position_embeddings": 48, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 4, "tie_word_embeddings": True,
}  # fmt: skip
"""A Gemma 2 with grouped queries and capped scores, whose tokens see six others in every second
block, and all in the others."""

DEVICES = Path("/proc/net/dev")

_OVERHEAD = 1.05
"""Allows for packet and gloo headers, acknowledgements, and the rendezvous. Other traffic of the
host counts too."""

_SCORE_DIGITS = 1e-5
"""Relative tolerance of scores of tasks in float32; a perplexity is the exponential of a sum of
losses of some hundred tokens."""
_LOSS_DIGITS = 1e-6
"""Relative tolerance of held-out losses in float32: 6e-8 for each of a dozen sums."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A GPT of four blocks with tensor-parallel degrees 2 and 2x2."""
    folder = tmp_path_factory.mktemp("pool")
    return RankPool(folder, 4, (2, TensorGrid(2, 2)), processes=ranks)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A BERT of four blocks with tensor-parallel degree 2x2."""
    return RankPool(
        tmp_path_factory.mktemp("encoders"), 4, (TensorGrid(2, 2),), model="bert-tiny",
        processes=ranks,
    )  # fmt: skip


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> RankPool:
    """A Llama whose four blocks have eight experts each."""
    folder = tmp_path_factory.mktemp("experts")
    return RankPool(folder, 4, (2,), model="moe-tiny", width=96, processes=ranks)


@pytest.fixture(scope="module")
def wide_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Eight processes, and the same GPT with degrees 2, 4 and 8, and in grids."""
    eight = RankPool(tmp_path_factory.mktemp("wide"), 8, (2, 4, 8, *GRIDS))
    yield eight
    eight.close()


class Checked:
    """Checks plans, and keeps the largest errors for a summary."""

    def __init__(self) -> None:
        self.plans: set[str] = set()
        self.worst = dict.fromkeys(TOLERANCE, 0.0)

    def check(self, pool: RankPool, plan: Plan) -> None:
        """Runs a plan, compares it with a single device and counts its bytes."""
        result, run = pool.verify(plan)
        assert result.passed, f"{result.first_mismatch}\n{plan.to_toml()}"
        last, expected = run.steps[-1], pool.last_step(plan.precision)
        assert last.held_out_loss == pytest.approx(expected.held_out_loss, rel=_LOSS_DIGITS)
        assert last.task_scores == pytest.approx(dict(expected.task_scores), rel=_SCORE_DIGITS)
        require_bytes(pool, plan, run)
        self.plans.add(plan.label)
        worst = max(each.error for each in result.comparisons)
        self.worst[plan.precision] = max(worst, self.worst[plan.precision])

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.worst.items() if error)
        return f"{len(self.plans)} plans equal to a single device; largest errors: {errors}"


def require_bytes(pool: RankPool, plan: Plan, run: InstrumentedRun) -> None:
    """Requires that the buffers given to torch, the groups' own count and the program agree."""
    for rank in range(plan.parallel.devices):
        counted, expected = sent_bytes(run, rank), sent_bytes_by_kind(plan, pool.graph, rank)
        assert {kind: n for kind, n in counted["buffers"].items() if n} == expected, plan.to_toml()
        for kind, nbytes in counted["groups"].items():
            assert nbytes == expected.get(kind, 0), f"{kind} of rank {rank}\n{plan.to_toml()}"


@pytest.mark.parametrize("tensor", [1, 2])
def test_two_ranks_that_divide_experts_equal_a_single_device(experts: RankPool, tensor: int):
    plan = tiny_plan(
        experts.graph, MACHINE, data=2, expert=2, tensor=tensor, micro=2, accumulation=2,
        sequence=SEQUENCE, precision="float64",
    )  # fmt: skip
    result, _ = experts.verify(plan)
    assert result.passed, result.first_mismatch


def test_ranks_that_divide_sequences_see_masked_and_windowed_tokens_of_the_others(
    encoders: RankPool, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    model = f"hf:{tmp_path / 'config.json'}"
    windowed = RankPool(tmp_path, 4, (), model=model, processes=encoders.processes)
    for pool in (encoders, windowed):
        plan = tiny_plan(
            pool.graph, MACHINE, context=2, micro=4, accumulation=BATCH // 4, sequence=SEQUENCE,
            precision="float64",
        )  # fmt: skip
        result, _ = pool.verify(plan)
        assert result.passed, result.first_mismatch


@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 4},
        slow({"context": 2, "pipeline": 2, "schedule": "zero-bubble"}),
        slow({"context": 2, "data": 2, "sharding": (2, 4), "recompute": "full"}),
        {"context": 2, "tensor": 2},
        slow({"context": 2, "recompute": "selective"}),
    ],
    ids=str,
)
def test_ranks_that_divide_sequences_equal_a_single_device(pool: RankPool, degrees: dict):
    plan = tiny_plan(
        pool.graph, MACHINE, micro=2, accumulation=BATCH // 2 // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    Checked().check(pool, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 4, "tensor": 2},
        {"context": 2, "tensor": 4},
        {"context": 2, "tensor": TensorGrid(2, 2)},
        {"context": 2, "tensor": 2, "pipeline": 2, "recompute": "selective"},
        {"context": 2, "tensor": 2, "data": 2, "sharding": (2, 4), "recompute": "full"},
    ],
    ids=str,
)
def test_eight_ranks_that_divide_sequences_and_layers_equal_a_single_device(
    wide_pool: RankPool, degrees: dict
):
    plan = tiny_plan(
        wide_pool.graph, MACHINE, micro=1, accumulation=BATCH // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    Checked().check(wide_pool, plan)


def test_ranks_that_divide_sequences_run_in_phases_from_a_disk(pool: RankPool) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, context=2, tensor=2, micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, offload=OFFLOADED[0], stages=(((0, 2), (2, 4), (4, LAYERS)),),
        recompute="full",
    )  # fmt: skip
    Checked().check(pool, plan)


def test_every_legal_plan_equals_a_single_device_and_sends_the_bytes_of_its_program(
    pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = Checked()

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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_dimensional_tensor_parallelism_equals_a_single_device_and_sends_its_bytes(
    pool: RankPool, precision: str
) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, tensor=TensorGrid(2, 2), micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, precision=precision,
    )  # fmt: skip
    Checked().check(pool, plan)


@pytest.mark.parametrize("tensor", [2, slow(TensorGrid(2, 2))])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_selective_recompute_with_tensor_parallelism_equals_a_single_device_and_gathers_again(
    pool: RankPool, tensor: int, precision: str
) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, tensor=tensor, micro=4, accumulation=BATCH // 4, sequence=SEQUENCE,
        precision=precision, recompute="selective",
    )  # fmt: skip
    Checked().check(pool, plan)
    without_recompute = tiny_plan(
        pool.graph, MACHINE, tensor=tensor, micro=4, accumulation=BATCH // 4, sequence=SEQUENCE,
        precision=precision,
    )  # fmt: skip
    twice, once = (
        sent_bytes_by_kind(each, pool.graph, 0)["backward"] for each in (plan, without_recompute)
    )
    assert once < twice < 2 * once


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_encoder_with_two_dimensional_tensor_parallelism_equals_a_single_device(
    encoders: RankPool, precision: str
) -> None:
    plan = tiny_plan(
        encoders.graph, MACHINE, tensor=TensorGrid(2, 2), micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, precision=precision,
    )  # fmt: skip
    Checked().check(encoders, plan)


@pytest.mark.slow
def test_two_dimensional_tensor_parallelism_runs_in_phases_from_a_disk(pool: RankPool) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, tensor=TensorGrid(2, 2), micro=4, accumulation=BATCH // 4,
        sequence=SEQUENCE, offload=OFFLOADED[0], stages=(((0, 2), (2, 4), (4, LAYERS)),),
        recompute="full",
    )  # fmt: skip
    Checked().check(pool, plan)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        slow({"tensor": 2, "data": 2, "sharding": (1, 2)}, {"tensor": TensorGrid(2, 2)}),
        ({"tensor": TensorGrid(2, 2)}, {"tensor": 2, "pipeline": 2}),
    ],
    ids=["2 x r2 to 2x2", "2x2 to p2 x 2"],
)
def test_a_run_resumes_under_a_plan_with_or_without_a_grid(
    pool: RankPool, before: dict, after: dict
) -> None:
    first, second = (
        tiny_plan(
            pool.graph, MACHINE, micro=2, accumulation=BATCH // 2 // degrees.get("data", 1),
            sequence=SEQUENCE, precision="float32", **degrees,
        )
        for degrees in (before, after)
    )  # fmt: skip
    resumed = pool.run(second, resume=pool.merged_checkpoint(pool.run(first), 1))
    reference, rel = pool.single_device_run("float32").steps[1:], TOLERANCE["float32"]
    for step, expected in zip(resumed.steps, reference, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=rel)
        assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=rel)
    loss, expected_loss = resumed.steps[-1].held_out_loss, pool.last_step("float32").held_out_loss
    assert loss == pytest.approx(expected_loss, rel=_LOSS_DIGITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline": 2, "tensor": TensorGrid(2, 2)},
        {"tensor": TensorGrid(2, 2), "data": 2, "sharding": (2, 2)},
        {"tensor": TensorGrid(2, 2), "data": 2, "sharding": (1, 2)},
        {"tensor": TensorGrid(4, 2)},
        {"tensor": TensorGrid(2, 4)},
        {"tensor": TensorGrid(1, 4)},
    ],
    ids=str,
)
def test_a_grid_works_with_pipeline_stages_and_sharding(wide_pool: RankPool, degrees: dict) -> None:
    plan = tiny_plan(
        wide_pool.graph, MACHINE, micro=1, accumulation=BATCH // degrees.get("data", 1),
        sequence=SEQUENCE, precision="float64", **degrees,
    )  # fmt: skip
    Checked().check(wide_pool, plan)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [(1, 1), (2, 2)], ids=str)
def test_sixteen_ranks_parallel_in_every_dimension_equal_a_single_device(
    tmp_path: Path, sharding: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    sixteen, checked = RankPool(tmp_path, 16, (TensorGrid(2, 2),)), Checked()
    try:
        plan = tiny_plan(
            sixteen.graph, MACHINE, pipeline=2, tensor=TensorGrid(2, 2), data=2, micro=1,
            accumulation=BATCH // 2, sequence=SEQUENCE, sharding=sharding, precision="float64",
        )  # fmt: skip
        checked.check(sixteen, plan)
    finally:
        sixteen.close()
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
    Checked().check(pool, offloaded_state_plan(pool, **degrees))


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
    Checked().check(pool, plan)


def test_a_run_with_offloaded_sharded_state_resumes_bit_identically(pool: RankPool) -> None:
    plan = offloaded_state_plan(pool, data=2, sharding=(1, 2), tensor=2, clip=False)
    full = pool.run(plan)
    resumed = pool.run(plan, resume=pool.merged_checkpoint(full, 1))
    assert [step.loss for step in resumed.steps] == [step.loss for step in full.steps[1:]]


def test_split_backward_works_with_sharded_parameters(pool: RankPool) -> None:
    plan = tiny_plan(
        pool.graph, MACHINE, pipeline=2, data=2, sharding=(2, 2), schedule="zero-bubble",
        micro=1, accumulation=4, sequence=SEQUENCE, precision="float64",
    )  # fmt: skip
    Checked().check(pool, plan)


PARALLELISM = {
    "sharded": {"data": 4, "sharding": (2, 4), "pipeline": 1},
    "pipeline-tensor": {"pipeline": 2, "tensor": 2, "micro": 2, "accumulation": BATCH // 2},
    "grid": {"tensor": TensorGrid(2, 2), "micro": 4, "accumulation": BATCH // 4},
    "pipeline-data": {"pipeline": 2, "data": 2},
    "context": {"context": 2},
}
"""Degrees of parallelism, in one of which each fault is possible, and sizes of micro-batches."""


@pytest.mark.parametrize(
    ("fault", "parallelism"),
    [
        ("loss-scale", "pipeline-data"), ("micro-batch", "pipeline-data"),
        ("update", "pipeline-tensor"), ("reduction", "pipeline-data"), slow("reduction", "sharded"),
        slow("reduction", "context"),
        ("samples", "pipeline-data"), ("shards", "sharded"), ("gather", "sharded"),
        ("tensor-reduce", "pipeline-tensor"), slow("tensor-reduce", "grid"),
        ("tied-gradient", "pipeline-tensor"),
    ],
)  # fmt: skip
def test_an_injected_fault_is_found_and_its_layer_named(
    pool: RankPool, fault: str, parallelism: str
) -> None:
    chosen = {"micro": 1, **PARALLELISM[parallelism]}
    chosen.setdefault("accumulation", BATCH // chosen.get("data", 1))
    plan = tiny_plan(pool.graph, MACHINE, sequence=SEQUENCE, precision="float64", **chosen)
    assert FAULTS[fault].is_possible(plan, pool.graph)
    result, _ = pool.verify(plan, fault)
    assert result.first_mismatch is not None
    if FAULTS[fault].single_layer:
        assert result.first_mismatch.layer == faulty_layer(plan)


def test_every_fault_is_injected_by_one_of_the_tests_above() -> None:
    marks = test_an_injected_fault_is_found_and_its_layer_named.pytestmark
    quick = {each[0] for each in marks[0].args[1] if not hasattr(each, "marks")}
    assert quick == set(FAULTS)


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
    checked = Checked()
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
    if pipeline * chunks > LAYERS or (offload is not None and chunks > 1):
        return None
    micro = 1 + turn % 2 if BATCH // data > 1 else 1
    stages = None
    if offload is not None:
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
