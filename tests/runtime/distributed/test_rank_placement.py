import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.child_processes import ChildProcesses
from windlass.program import lower, mesh_coord
from windlass.runtime import LocalLauncher, RankPlacement, WatchdogTimeouts
from windlass.runtime.distributed.rank_placement import on_cores, rank_placements
from windlass.torch_ext import Device, device_for

CORES = sorted(os.sched_getaffinity(0))
REPORT = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
"""Prints the cores of its process."""

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core has no other to be bound to")


class _Gpus(Device):
    """A host's GPUs, of which torch sees some."""

    def __init__(self, count: int, visible: tuple[int, ...] | None = None) -> None:
        super().__init__(torch.device("cuda", 0))
        self._count, self._visible = count, visible

    def count(self) -> int:
        return self._count

    def visible_indices(self) -> tuple[int, ...] | None:
        return self._visible


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., Path]:
    """A folder with `/proc` and `/sys` of a host: the cores of each node and near each GPU."""

    def make(nodes: tuple[str, ...] = (), gpus: tuple[str, ...] = ()) -> Path:
        for index, cores in enumerate(nodes):
            node = tmp_path / f"sys/devices/system/node/node{index}"
            node.mkdir(parents=True)
            (node / "cpulist").write_text(f"{cores}\n")
        for index, cores in enumerate(gpus):
            address = f"0000:{16 * index + 10:02x}:00.0"
            (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
            device = tmp_path / "sys/bus/pci/devices" / address
            device.mkdir(parents=True)
            (device / "local_cpulist").write_text(f"{cores}\n")
        return tmp_path

    return make


def cores_of(placements: tuple[RankPlacement, ...]) -> list[list[int]]:
    return [sorted(placement.cores) for placement in placements]


def test_ranks_on_a_cpu_with_one_node_keep_all_cores_and_share_the_threads(
    host: Callable[..., Path],
):
    root = host(nodes=(f"{CORES[0]}-{CORES[-1]}",))
    placements = rank_placements(device_for("cpu"), 2, 8, root=root)
    assert cores_of(placements) == [CORES, CORES]
    assert [placement.threads for placement in placements] == [4, 4]


@needs_two_cores
def test_ranks_on_a_cpu_are_spread_over_its_nodes(host: Callable[..., Path]):
    first, second = CORES[:2]
    root = host(nodes=(str(first), str(second)))
    with on_cores(frozenset((first, second))):
        placements = rank_placements(device_for("cpu"), 4, 8, root=root)
        alone = rank_placements(device_for("cpu"), 1, 8, root=root)
    assert cores_of(placements) == [[first], [first], [second], [second]]
    assert [placement.threads for placement in placements] == [2, 2, 2, 2]
    assert alone == (RankPlacement(frozenset((first, second)), 8),)


@needs_two_cores
def test_a_rank_gets_the_cores_near_its_gpu(host: Callable[..., Path]):
    first, second = CORES[:2]
    root = host(gpus=(str(second), str(first), str(first)))
    with on_cores(frozenset((first, second))):
        placements = rank_placements(_Gpus(3), 3, 12, root=root)
        restricted = rank_placements(_Gpus(2, visible=(2, 0)), 2, 12, root=root)
    assert cores_of(placements) == [[second], [first], [first]]
    assert [placement.threads for placement in placements] == [6, 3, 3]
    assert cores_of(restricted) == [[first], [second]]


@pytest.mark.parametrize(
    "gpus",
    [_Gpus(2), _Gpus(2, visible=()), _Gpus(2, visible=(0, 9))],
    ids=["fewer than listed", "named by UUID", "not listed"],
)
def test_a_rank_is_not_bound_where_nobody_knows_which_gpu_is_its_own(
    host: Callable[..., Path], gpus: Device
):
    root = host(gpus=(str(CORES[0]),) * 3)
    assert cores_of(rank_placements(gpus, 2, 2, root=root)) == [CORES, CORES]


def test_cores_that_this_process_may_not_use_are_not_asked_for(host: Callable[..., Path]):
    root = host(nodes=(f"{CORES[0]}-{CORES[-1]}", "4000-4003"), gpus=("4000-4003",))
    assert cores_of(rank_placements(_Gpus(1), 1, 2, root=root)) == [CORES]
    assert cores_of(rank_placements(device_for("cpu"), 2, 2, root=root)) == [CORES, CORES]


def test_a_process_is_bound_from_its_beginning_and_its_parent_is_not():
    with on_cores(frozenset(CORES[:1])):
        done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, check=True)
    assert json.loads(done.stdout) == CORES[:1]
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_the_launcher_binds_each_rank_to_its_own_cores(tmp_path: Path):
    graph = tiny_graph()
    plan = tiny_plan(graph, tiny_machine(devices=2), data=2)
    code = (
        "import json, os, sys; report = {'cores': sorted(os.sched_getaffinity(0)), "
        "'threads': os.environ['OMP_NUM_THREADS']}; text = json.dumps(report); "
        "print(text, file=sys.stderr); print(text, flush=True); print('null', flush=True)"
    )
    placements = [RankPlacement(frozenset((core,)), 3) for core in (CORES[0], CORES[-1])]
    launcher = LocalLauncher(
        tmp_path, ChildProcesses((sys.executable, "-c", code)), (), lower(plan, graph),
        [mesh_coord(rank, plan.parallel) for rank in range(2)],
        timeouts=WatchdogTimeouts(hang_seconds=60, compile_seconds=0), placements=placements,
    )  # fmt: skip
    try:
        assert list(launcher.steps(lambda: False)) == [{"cores": CORES[:1], "threads": "3"}]
    finally:
        launcher.close()
    other = json.loads((tmp_path / "ranks" / "1.err").read_text())
    assert other == {"cores": CORES[-1:], "threads": "3"}
