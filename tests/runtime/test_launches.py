"""What a step asks of an accelerator, counted on a fake one that computes nothing."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from factories import catalog_graph, tiny_machine, tiny_plan
from fake_accelerator import multi_tensor_kernels
from windlass.cost.optimizer_time import norm_call_seconds, update_seconds

GPT2 = {"model": "gpt2-124m", "dials": {"layers": 2}}
"""Two of its twelve blocks, each of which asks for as much."""
TINY = {"model": "gpt-tiny", "dials": {"layers": 2}, "sequence": 128}
ACCUMULATED = {**TINY, "accumulation": 2}
PHASES = {**TINY, "phases": [[0, 2], [2, 4]]}
SHARDED = {**TINY, "data": 2, "sharding": [2, 2]}
EXPERTS = {"model": "moe-tiny", "dials": {"layers": 2}, "sequence": 128}
DIVIDED_EXPERTS = {**EXPERTS, "data": 2, "expert": 2}
MORE_BLOCKS, MORE_NORMS = 10, 4
"""What the whole model has more: blocks, and kernels that sum the squares of their gradients."""
RUNS = (GPT2, ACCUMULATED, PHASES, SHARDED, EXPERTS, DIVIDED_EXPERTS)
PREDICTED = 0.25
"""Relative tolerance of predicted launches: a few differ between layers of one kind."""


class Count(NamedTuple):
    """What the last step asked of the device, by instruction such as `forward 3 0`."""

    launches: dict[str, int]
    waits: dict[str, dict[str, int]]
    changes: list[str]
    """Operations whose arguments were others in the step before."""

    def of(self, kind: str) -> int:
        """Launches of all instructions of a kind."""
        return sum(n for label, n in self.launches.items() if label.split()[0] == kind)

    @property
    def total(self) -> int:
        """Launches of the step."""
        return sum(self.launches.values())


@pytest.fixture(scope="module")
def output() -> list[str]:
    """What a process that counts all runs prints: the fake device is one for a whole process."""
    return printed(*RUNS)


def printed(*runs: dict) -> list[str]:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(tests / "fake_steps.py"), *map(json.dumps, runs)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def counted(output: list[str]) -> Callable[[dict], Count]:
    """`counted(GPT2)`: what that run's last step asked for."""

    return lambda run: count_of(output[1 + RUNS.index(run)])


def count_of(line: str) -> Count:
    step = json.loads(line)
    rows = step["instructions"].items()
    return Count(
        {label: sum(row["launches"].values()) for label, row in rows},
        {label: row["waits"] for label, row in rows if row["waits"]},
        step["changes"],
    )


def of_whole_model(two_blocks: Count) -> dict[str, int]:
    """Launches of all twelve blocks of GPT-2 and of what is around them, by kind."""
    whole = {
        kind: two_blocks.of(kind) + MORE_BLOCKS * two_blocks.launches[f"{kind} 2 0"]
        for kind in ("forward", "backward", "update")
    }
    return {
        **whole,
        "grad_norm": two_blocks.of("grad_norm") + MORE_NORMS,
        "load_batch": two_blocks.of("load_batch"),
    }


@pytest.mark.slow
def test_the_whole_of_gpt2_launches_what_two_of_its_blocks_say(counted: Callable[[dict], Count]):
    whole = count_of(printed({"model": "gpt2-124m"})[1])
    assert of_whole_model(counted(GPT2)) == {
        kind: n for kind in of_whole_model(counted(GPT2)) if (n := whole.of(kind))
    }


def test_a_step_of_gpt2_launches_at_most_512_kernels(counted: Callable[[dict], Count]):
    step = of_whole_model(counted(GPT2))
    assert step["forward"] <= 128
    assert step["backward"] <= 240
    assert step["grad_norm"] <= 28
    assert step["update"] <= 114
    assert sum(step.values()) <= 512


def test_a_block_of_gpt2_launches_37_kernels(counted: Callable[[dict], Count]):
    launches = counted(GPT2).launches
    for layer in (1, 2):
        assert launches[f"forward {layer} 0"] <= 10
        assert launches[f"backward {layer} 0"] <= 19
        assert launches[f"update {layer} 0"] <= 8


def test_further_micro_batches_phases_and_shards_launch_no_more_than_they_did(
    counted: Callable[[dict], Count],
):
    assert counted(ACCUMULATED).total <= 209
    assert counted(PHASES).total <= 474
    assert counted(SHARDED).total <= 142


def test_the_host_waits_once_for_losses_and_norm_and_once_at_the_end(
    counted: Callable[[dict], Count],
):
    for run in (GPT2, ACCUMULATED, PHASES):
        assert counted(run).waits == {
            "grad_norm 0 0": {"_to_copy between devices": 1},
            "sync 0 0": {"synchronize": 1},
        }


def test_several_ranks_wait_once_more_for_their_sum(counted: Callable[[dict], Count]):
    assert counted(SHARDED).waits == {
        "grad_norm 0 0": {"_to_copy between devices": 2},
        "sync 0 0": {"synchronize": 1},
    }


def test_experts_on_one_device_make_the_host_wait_no_more(counted: Callable[[dict], Count]):
    assert counted(EXPERTS).waits == {
        "grad_norm 0 0": {"_to_copy between devices": 1},
        "sync 0 0": {"synchronize": 1},
    }


def test_divided_experts_make_the_host_wait_once_a_layer_in_the_forward_pass_alone(
    counted: Callable[[dict], Count],
):
    assert counted(DIVIDED_EXPERTS).waits == {
        "forward 1 0": {"_to_copy between devices": 1},
        "forward 2 0": {"_to_copy between devices": 1},
        "grad_norm 0 0": {"_to_copy between devices": 2},
        "sync 0 0": {"synchronize": 1},
    }


def test_the_fake_device_notices_waits_and_mixed_devices(output: list[str]):
    assert json.loads(output[0]) == {
        "mix": "FakeTensorDeviceMismatchError",
        "item": "_local_scalar_dense",
        "branch": "_local_scalar_dense",
        "read": "_to_copy between devices",
        "write": "copy_ between devices",
        "new tensor": "_to_copy between devices",
        "asynchronous write": "no wait",
        "nonzero": "DynamicOutputShapeException",
        "unique": "DynamicOutputShapeException",
    }


def test_two_steps_differ_only_in_the_learning_rate(counted: Callable[[dict], Count]):
    for run in (GPT2, ACCUMULATED, SHARDED):
        assert counted(run).changes == ["_fused_adamw_"]


def test_the_prediction_has_the_launches_of_norm_and_update(counted: Callable[[dict], Count]):
    device = tiny_machine().device.model_copy(update={"kind": "cuda", "launch_seconds": 1.0})
    graph = catalog_graph("gpt2-124m")
    plan = tiny_plan(graph, tiny_machine(), precision="bfloat16")
    kinds, step = tuple(graph.layer_kinds()), of_whole_model(counted(GPT2))
    norms = norm_call_seconds(plan, device)
    updates = sum(update_seconds(plan, kind, device).launch for kind in kinds)
    for launches in (step["grad_norm"], counted(GPT2).of("grad_norm")):  # also of two blocks
        assert norms == pytest.approx(launches, rel=PREDICTED)
    assert updates == pytest.approx(step["update"], rel=PREDICTED)


@pytest.mark.parametrize(
    ("sizes", "lists", "kernels"),
    [
        ([1], 1, 1),
        ([65536 * 320], 4, 1),
        ([65536 * 320 + 1], 4, 2),
        ([10] * 110, 1, 1),
        ([10] * 111, 1, 2),
        ([10] * 36, 4, 1),
        ([10] * 37, 4, 2),
        ([0, 0], 2, 0),
        ([65536 * 319, 65536 * 2, 5], 2, 2),
    ],
)
def test_a_call_on_many_tensors_launches_a_kernel_when_one_is_full(
    sizes: list[int], lists: int, kernels: int
):
    assert multi_tensor_kernels(sizes, lists) == kernels
