"""Any legal plan trains a model as one device does, and sends what its program says.

`pytest -m slow tests/runtime/test_pod.py` goes through the whole grid on 1 to 8 processes, which
takes some ten minutes on two cores.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from factories import tiny_plan
from pods import (
    BATCH,
    FAR,
    LAYERS,
    MACHINE,
    SEQUENCE,
    SETTINGS,
    World,
    cuts,
    divisors,
    legal,
    plans,
    sent_by,
)
from windlass.program.communication_volume import sent_bytes_by_kind
from windlass.runtime.verify.compare_runs import InstrumentedRun
from windlass.runtime.verify.fault_injection import FAULTS, faulty_layer
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan
from windlass.schema.tensor_grid import TensorGrid
from windlass.schema.verification import TOLERANCE

SAMPLED = 20
"""Plans of the default suite."""

GRIDS = (TensorGrid(2, 2), TensorGrid(4, 2), TensorGrid(2, 4), TensorGrid(1, 4))

DEVICES = Path("/proc/net/dev")

_OVERHEAD = 1.05
"""Headers of packets and of gloo's messages, acknowledgements, and how devices find each other.
Other traffic of the host counts too."""

_LOSS_DIGITS = 1e-6
"""Held-out losses in float32 differ by less: 6e-8 for each of a dozen sums."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four processes, and a GPT of four blocks that can be cut in two slices, or two by two."""
    four = World(tmp_path_factory.mktemp("world"), 4, (2, TensorGrid(2, 2)))
    yield four
    four.close()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four processes, and a BERT of four blocks that can be cut two by two."""
    four = World(tmp_path_factory.mktemp("encoders"), 4, (TensorGrid(2, 2),), model="bert-tiny")
    yield four
    four.close()


@pytest.fixture(scope="module")
def wide_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Eight processes, and the same in two, four and eight slices, and in grids of them."""
    eight = World(tmp_path_factory.mktemp("wide"), 8, (2, 4, 8, *GRIDS))
    yield eight
    eight.close()


class Seen:
    """What a list of plans came to."""

    def __init__(self) -> None:
        self.plans: set[str] = set()
        self.worst = dict.fromkeys(TOLERANCE, 0.0)

    def add(self, world: World, plan: Plan) -> None:
        """Runs a plan, holds it against one device and counts its bytes."""
        proof, ran = world.proof(plan)
        assert proof.passed, f"{proof.first_mismatch}\n{plan.to_toml()}"
        lost, whole = ran.steps[-1].held_out_loss, world.held_out(plan.precision)
        assert lost == pytest.approx(whole, rel=_LOSS_DIGITS)
        require_bytes(world, plan, ran)
        self.plans.add(plan.label)
        worst = max(each.error for each in proof.comparisons)
        self.worst[plan.precision] = max(worst, self.worst[plan.precision])

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.worst.items() if error)
        return f"{len(self.plans)} plans equal to one device; largest errors: {errors}"


def require_bytes(world: World, plan: Plan, ran: InstrumentedRun) -> None:
    """The buffers that torch was given, the pod's own count and the program agree."""
    for device in range(plan.parallel.devices):
        told, expected = sent_by(ran, device), sent_bytes_by_kind(plan, world.graph, device)
        assert {kind: n for kind, n in told["buffers"].items() if n} == expected, plan.to_toml()
        for kind, nbytes in told["pod"].items():
            assert nbytes == expected.get(kind, 0), f"{kind} of device {device}\n{plan.to_toml()}"


def test_every_legal_plan_equals_one_device_and_sends_the_bytes_of_its_program(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Seen()

    @settings(
        max_examples=SAMPLED,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(plans(world.graph))
    def each(plan: Plan) -> None:
        seen.add(world, plan)

    each()
    with capsys.disabled():
        print(f"\n{seen}")


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_grid_of_slices_equals_one_device_and_sends_the_bytes_of_its_program(
    world: World, precision: str
) -> None:
    plan = tiny_plan(
        world.graph, MACHINE, tensor=TensorGrid(2, 2), micro=2, accumulation=BATCH // 2,
        sequence=SEQUENCE, precision=precision,
    )  # fmt: skip
    Seen().add(world, plan)


@pytest.mark.parametrize("tensor", [2, TensorGrid(2, 2)])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_slices_that_keep_only_large_products_equal_one_device_and_gather_once_more(
    world: World, tensor: int, precision: str
) -> None:
    plan = tiny_plan(
        world.graph, MACHINE, tensor=tensor, micro=2, accumulation=BATCH // 2, sequence=SEQUENCE,
        precision=precision, recompute="selective",
    )  # fmt: skip
    Seen().add(world, plan)
    keeping = tiny_plan(
        world.graph, MACHINE, tensor=tensor, micro=2, accumulation=BATCH // 2, sequence=SEQUENCE,
        precision=precision,
    )  # fmt: skip
    again, once = (sent_bytes_by_kind(each, world.graph, 0)["backward"] for each in (plan, keeping))
    assert once < again < 2 * once


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_an_encoder_in_a_grid_of_slices_equals_one_device(encoders: World, precision: str) -> None:
    plan = tiny_plan(
        encoders.graph, MACHINE, tensor=TensorGrid(2, 2), micro=2, accumulation=BATCH // 2,
        sequence=SEQUENCE, precision=precision,
    )  # fmt: skip
    Seen().add(encoders, plan)


def test_a_grid_of_slices_runs_in_phases_from_a_disk(world: World) -> None:
    plan = tiny_plan(
        world.graph, MACHINE, tensor=TensorGrid(2, 2), micro=2, accumulation=BATCH // 2,
        sequence=SEQUENCE, offload=FAR[0], stages=(((0, 2), (2, 4), (4, LAYERS)),),
        recompute="full",
    )  # fmt: skip
    Seen().add(world, plan)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tensor": 2, "data": 2, "sharding": (1, 2)}, {"tensor": TensorGrid(2, 2)}),
        ({"tensor": TensorGrid(2, 2)}, {"tensor": 2, "pipeline": 2}),
    ],
    ids=["2 x r2 to 2x2", "2x2 to p2 x 2"],
)
def test_a_run_goes_on_with_a_grid_or_without_it(world: World, before: dict, after: dict) -> None:
    first, then = (
        tiny_plan(
            world.graph, MACHINE, micro=1, accumulation=BATCH // cut.get("data", 1),
            sequence=SEQUENCE, precision="float32", **cut,
        )
        for cut in (before, after)
    )  # fmt: skip
    again = world.run(then, begun=world.left_by(world.run(first), 1))
    for mine, its in zip(again.steps, world.alone("float32").steps[1:], strict=True):
        assert mine.loss == pytest.approx(its.loss, rel=TOLERANCE["float32"])
        assert mine.gradient_norm == pytest.approx(its.gradient_norm, rel=TOLERANCE["float32"])
    lost, whole = again.steps[-1].held_out_loss, world.held_out("float32")
    assert lost == pytest.approx(whole, rel=_LOSS_DIGITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
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
def test_a_grid_goes_with_stages_and_shards(wide_world: World, cut: dict) -> None:
    plan = tiny_plan(
        wide_world.graph, MACHINE, micro=1, accumulation=BATCH // cut.get("data", 1),
        sequence=SEQUENCE, precision="float64", **cut,
    )  # fmt: skip
    Seen().add(wide_world, plan)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [(1, 1), (2, 2)], ids=str)
def test_sixteen_processes_cut_in_every_dimension_equal_one_device(
    tmp_path: Path, sharding: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    sixteen, seen = World(tmp_path, 16, (TensorGrid(2, 2),)), Seen()
    try:
        plan = tiny_plan(
            sixteen.graph, MACHINE, pipeline=2, tensor=TensorGrid(2, 2), data=2, micro=1,
            accumulation=BATCH // 2, sequence=SEQUENCE, sharding=sharding, precision="float64",
        )  # fmt: skip
        seen.add(sixteen, plan)
    finally:
        sixteen.close()
    with capsys.disabled():
        print(f"\n{seen}")


@pytest.mark.parametrize(
    "cut",
    [
        {"data": 4, "sharding": (1, 4)},
        {"data": 4, "sharding": (2, 4)},
        {"data": 2, "sharding": (1, 2), "pipeline": 2},
    ],
    ids=str,
)
def test_more_replicas_may_share_state_that_is_away_than_weights_that_stay(
    world: World, cut: dict
) -> None:
    """So BERT-Large ran on the IPU-POD16: the state in streaming memory, shared by 4 replicas."""
    Seen().add(world, away(world, **cut))


def away(world: World, **cut: Any) -> Plan:  # noqa: ANN401  handed on to the factory
    """Weights near and state on a disk."""
    return tiny_plan(
        world.graph, MACHINE, micro=1, accumulation=BATCH // cut["data"], sequence=SEQUENCE,
        offload=Offload(optimizer="disk"), **cut,
    )  # fmt: skip


def test_chunks_that_interleave_keep_their_state_away(world: World) -> None:
    plan = away(world, pipeline=2, replicas=2, sharding=(2, 2), order="interleaved", interleave=2)
    Seen().add(world, plan)


def test_state_that_is_away_and_shared_goes_on_bit_for_bit(world: World) -> None:
    plan = away(world, replicas=2, sharding=(1, 2), tensor=2, clip=False)
    whole = world.run(plan)
    again = world.run(plan, begun=world.left_by(whole, 1))
    assert [step.loss for step in again.steps] == [step.loss for step in whole.steps[1:]]


def test_parted_backward_passes_go_with_shared_weights(world: World) -> None:
    plan = tiny_plan(
        world.graph, MACHINE, pipeline=2, data=2, sharding=(2, 2), schedule="zero-bubble",
        micro=1, accumulation=4, sequence=SEQUENCE, precision="float64",
    )  # fmt: skip
    Seen().add(world, plan)


FAULTY = {
    "shared": {"data": 4, "sharding": (2, 4), "pipeline": 1},
    "cut": {"pipeline": 2, "tensor": 2},
    "grid": {"tensor": TensorGrid(2, 2)},
    "replicated": {"pipeline": 2, "data": 2},
}
"""Plans, one of which can make each mistake."""


@pytest.mark.parametrize(
    ("fault", "cut"),
    [
        ("loss-scale", "replicated"), ("micro-batch", "replicated"), ("update", "cut"),
        ("reduction", "replicated"), ("reduction", "shared"), ("samples", "replicated"),
        ("shards", "shared"), ("unshard_weights", "shared"), ("slice-sum", "cut"), ("slice-sum", "grid"),
        ("loan", "cut"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_and_its_layer_named(world: World, fault: str, cut: str) -> None:
    chosen = FAULTY[cut]
    plan = tiny_plan(
        world.graph, MACHINE, micro=1, accumulation=BATCH // chosen.get("data", 1),
        sequence=SEQUENCE, precision="float64", **chosen,
    )  # fmt: skip
    assert FAULTS[fault].is_possible(plan, world.graph)
    proof, _ = world.proof(plan, fault)
    assert proof.first_mismatch is not None
    if FAULTS[fault].single_layer:
        assert proof.first_mismatch.layer == faulty_layer(plan)


def test_each_mistake_is_made_by_one_of_the_tests_above() -> None:
    marks = test_a_mistake_is_found_and_its_layer_named.pytestmark
    assert {fault for fault, _ in marks[0].args[1]} == set(FAULTS)


@pytest.mark.slow
@pytest.mark.skipif(not DEVICES.exists(), reason="only Linux tells what a network device sent")
@pytest.mark.parametrize(
    "cut",
    [{"pipeline": 2, "data": 2}, {"data": 4, "sharding": (2, 4)}, {"tensor": 2}],
    ids=["stages", "shards", "slices"],
)
def test_the_kernel_sends_what_the_program_says_and_a_little_more(
    tmp_path: Path, cut: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    large = World(tmp_path, 4, (2,), width=512)
    try:
        plan = tiny_plan(
            large.graph, MACHINE, micro=1, accumulation=BATCH // cut.get("data", 1),
            sequence=SEQUENCE, **cut,
        )  # fmt: skip
        settings = SETTINGS.model_copy(update={"evaluate_sequences": 0, "save_every": 3})
        large.run(plan, settings=settings)
        before = loopback_bytes()
        large.run(plan, settings=settings)
        sent = loopback_bytes() - before
    finally:
        large.close()
    devices = range(plan.parallel.devices)
    told = SETTINGS.steps * sum(sum(sent_bytes_by_kind(plan, large.graph, at).values()) for at in devices)
    with capsys.disabled():
        print(f"\nthe kernel sent {sent / told:.4f} times {told} bytes")
    assert told < sent < _OVERHEAD * told


def loopback_bytes() -> int:
    """All that the loopback device has sent."""
    line = next(line for line in DEVICES.read_text().splitlines() if "lo:" in line)
    return int(line.split()[9])


@pytest.mark.slow
def test_the_whole_grid_of_plans_equals_one_device(
    wide_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Seen()
    for plan in grid(wide_world.graph):
        seen.add(wide_world, plan)
        if len(seen.plans) % 50 == 0:
            with capsys.disabled():
                print(f"\n{seen}")
    with capsys.disabled():
        print(f"\n{seen}")
    assert len(seen.plans) > 200


def grid(graph: Graph) -> Iterator[Plan]:
    """Every cut with every sharding, order and home, on 1 to 8 devices.

    What they have least to do with (micro-batch, recompute, precision, clipping) goes round.
    """
    turn = 0
    for devices, home in product((1, 2, 4, 8), (None, *FAR)):
        for pipeline, tensor, replicas in cuts(devices, tuple(graph.tensor_shards)):
            for optimizer in divisors(replicas):
                for weights, order in product(
                    divisors(optimizer), ("gpipe", "1f1b", "zero-bubble", "interleaved")
                ):
                    turn += 1
                    plan = _of_grid(
                        graph, turn, (pipeline, tensor, replicas), (weights, optimizer), order, home
                    )
                    if plan is not None and legal(plan, graph):
                        yield plan


def _of_grid(
    graph: Graph,
    turn: int,
    cut: tuple[int, int, int],
    sharding: tuple[int, int],
    order: str,
    home: object,
) -> Plan | None:
    pipeline, tensor, replicas = cut
    chunks = 2 if order == "interleaved" else 1
    if pipeline * chunks > LAYERS or (home is not None and chunks > 1):
        return None
    micro = 1 + turn % 2 if BATCH // replicas > 1 else 1
    stages = None
    if home is not None:
        ends = [round(at * LAYERS / pipeline) for at in range(pipeline + 1)]
        stages = tuple(
            ((first, first + 1), (first + 1, last)) if last - first > 1 else ((first, last),)
            for first, last in pairwise(ends)
        )
    return tiny_plan(
        graph, MACHINE, pipeline=pipeline, tensor=tensor, data=replicas, micro=micro,
        accumulation=BATCH // replicas // micro, sequence=SEQUENCE, sharding=sharding,
        schedule=order, virtual_stages=chunks, offload=home, stages=stages,
        recompute=("none", "layer")[turn // 2 % 2],
        precision="float32" if home is not None or turn % 5 == 0 else "float64",
    )  # fmt: skip
