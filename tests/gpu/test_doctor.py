"""`windlass doctor` itself: on a machine in order no check fails."""

from pathlib import Path

import pytest
import torch

from windlass.doctor.check_process import CheckRun, run_checks
from windlass.doctor.check_worker import run_check
from windlass.doctor.findings import Check, WorkerTask
from windlass.doctor.kernel_checks import kernel_checks
from windlass.doctor.memory_checks import memory_checks
from windlass.schema import DoctorCheck
from windlass.torch_ext import Device

COMPILED = "compiled layer"
"""The one check of kernels that takes as long as a compiler."""

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
"""Whole runs take half a minute on two cores."""


def task(device: Device, group: str, folder: Path) -> WorkerTask:
    name = str(device.torch_device)
    return WorkerTask(group=group, device=name, label=name, folder=folder)


def failed(results: list[DoctorCheck]) -> list[str]:
    return [f"{check.name}: {check.detail}" for check in results if check.status == "failed"]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_every_kernel_computes_what_the_cpu_does_in_float64(device: Device, tmp_path: Path):
    mine = task(device, "kernels", tmp_path)
    checks: list[Check] = list(kernel_checks(mine, lambda *_: None))
    if not device.is_asynchronous:
        checks = [check for check in checks if check.name != COMPILED]
    results = [run_check(check, mine) for check in checks]
    assert failed(results) == []
    assert sum(check.status == "ok" for check in results) >= 10


def test_allocators_statistics_and_running_out_of_memory_are_as_they_should_be(
    device: Device, tmp_path: Path
):
    mine = task(device, "memory", tmp_path)
    results = [run_check(check, mine) for check in memory_checks(mine, lambda *_: None)]
    assert failed(results) == []
    assert {check.name: check.status for check in results}["out of memory"] == "ok"


def test_every_exchange_between_ranks_is_exact(device: Device, tmp_path: Path):
    ranks = torch.cuda.device_count() if device.is_asynchronous else 2
    if ranks < 2:
        pytest.skip("one GPU: ranks exchange nothing")
    results = list(run_checks(CheckRun("ranks", device.kind, ranks=ranks), tmp_path))
    assert failed(results) == []
    rings = next(check.rings for check in results if check.name == "all-reduce by size")
    assert all(ring.rate > 0 for ring in rings)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("group", ["machine", "plans", "steps"])
def test_plans_equal_one_device_and_steps_take_as_long_as_predicted(
    device: Device, group: str, tmp_path: Path
):
    devices = max(2, torch.cuda.device_count()) if device.is_asynchronous else 2
    run = CheckRun(group, device.kind, devices=devices, limit_seconds=600.0)
    results = list(run_checks(run, tmp_path))
    assert results
    assert failed(results) == []
    for check in results:
        if check.measurement is not None:
            assert abs(check.measurement.bytes_error) < MEMORY_ERROR


MEMORY_ERROR = 0.2
"""Relative error of predicted memory that two processes reach here; one is within 5 %."""
