"""The processes of checks: what becomes of the others when one fails, dies or hangs."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from windlass.doctor.all_checks import check_runs
from windlass.doctor.check_process import CheckRun, run_checks
from windlass.doctor.check_worker import run_check
from windlass.doctor.findings import (
    Check,
    Finding,
    NotAvailableError,
    WorkerTask,
    WrongResultError,
)
from windlass.schema import DoctorCheck, DoctorSystem

SYSTEM = DoctorSystem(windlass="0", python="3", torch="2", processor="a CPU", cores=2, kind="cpu")


def task(folder: Path) -> WorkerTask:
    return WorkerTask(group="kernels", device="cpu", label="cpu", folder=folder)


def outcome(folder: Path, result: Finding | Exception) -> DoctorCheck:
    """The row of a check that returns or raises this."""

    def run() -> Finding:
        if isinstance(result, Exception):
            raise result
        return result

    return run_check(Check("a check", run, "mend it"), task(folder))


def test_a_check_is_ok_slow_skipped_or_failed_by_what_it_finds(tmp_path: Path):
    assert outcome(tmp_path, Finding("3 GB/s")).status == "ok"
    slow = outcome(tmp_path, Finding("3 GB/s", slow="end other processes"))
    assert (slow.status, slow.way_out) == ("slow", "end other processes")
    assert outcome(tmp_path, NotAvailableError("one device")).status == "skipped"
    wrong = outcome(tmp_path, WrongResultError("differs by 1e-2"))
    assert (wrong.status, wrong.way_out) == ("failed", "mend it")


def test_a_failure_names_no_path_of_its_user(tmp_path: Path):
    row = outcome(tmp_path, OSError(f"cannot open {tmp_path}/libcuda.so.1: no such file"))
    assert str(tmp_path) not in row.detail
    assert "cannot open <path>" in row.detail


@pytest.mark.slow
def test_a_process_that_cannot_start_is_one_failed_check(tmp_path: Path):
    (row,) = run_checks(CheckRun("memory", "nonsense"), tmp_path)
    assert row.status == "failed"
    assert "nonsense" in row.detail


@pytest.mark.slow
def test_a_process_that_dies_fails_its_check_and_the_next_ones_go_on(tmp_path: Path):
    rows = run_checks(CheckRun("kernels", "cpu"), tmp_path)
    assert next(rows).status == "ok"
    (worker,) = psutil.Process().children()
    worker.kill()
    failed = next(row for row in rows if row.status == "failed")
    assert "SIGKILL" in failed.detail
    following = next(rows)
    assert following.status == "ok"
    assert following.name != failed.name
    rows.close()
    assert psutil.Process().children() == []


@pytest.mark.slow
def test_a_process_that_gives_no_sign_of_life_fails_its_check(tmp_path: Path):
    rows: Iterator[DoctorCheck] = run_checks(
        CheckRun("kernels", "cpu", limit_seconds=8.0), tmp_path
    )
    assert next(rows).status == "ok"
    (worker,) = psutil.Process().children()
    worker.suspend()
    failed = next(row for row in rows if row.status == "failed")
    assert "no sign of life for 8 s" in failed.detail
    rows.close()


def test_ranks_are_tried_on_two_to_all_devices():
    eight = SYSTEM.model_copy(update={"kind": "cuda", "accelerators": ("a GPU",) * 6})
    runs = list(check_runs(eight))
    assert [run.ranks for run in runs if run.group == "ranks"] == [2, 4, 6]
    assert [run.device for run in runs if run.group == "kernels"] == [f"cuda:{i}" for i in range(6)]
    assert next(run.devices for run in runs if run.group == "plans") == 6


def test_one_gpu_has_no_ranks_and_a_cpu_has_two():
    one = SYSTEM.model_copy(update={"kind": "cuda", "accelerators": ("a GPU",)})
    assert not [run for run in check_runs(one) if run.group == "ranks"]
    assert [run.ranks for run in check_runs(SYSTEM) if run.group == "ranks"] == [2]
