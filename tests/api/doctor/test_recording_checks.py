"""The check that recorded steps are those of a run without recording, with other pins here."""

from pathlib import Path

import pytest

from windlass.doctor.findings import NotAvailableError, WorkerTask, WrongResultError
from windlass.doctor.recording_checks import recorded_run, same_losses
from windlass.doctor.run_checks import ONE_PLAN, TINY

REQUEST = ("gpt-tiny", *TINY, *ONE_PLAN)


def test_a_cpu_has_no_recorded_steps_to_check(tmp_path: Path):
    task = WorkerTask(group="plans", device="cpu", label="cpu", folder=tmp_path)
    with pytest.raises(NotAvailableError, match="torch records no work of `cpu`"):
        recorded_run(task, REQUEST)


@pytest.mark.slow
def test_runs_of_equal_steps_are_found_equal(tmp_path: Path):
    assert "bit for bit" in same_losses(tmp_path, REQUEST, "recompute=none").detail


@pytest.mark.slow
def test_a_run_that_differs_is_found_by_its_first_step(tmp_path: Path):
    with pytest.raises(WrongResultError, match=r"step 1: loss and norm are .* `train.seed=5`"):
        same_losses(tmp_path, REQUEST, "train.seed=5")
