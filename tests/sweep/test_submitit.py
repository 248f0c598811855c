"""Trials as jobs of submitit, by its local executor, which stands for Slurm."""

from pathlib import Path

import pytest
from made_sweeps import made_driver, made_request

from windlass.sweep.jobs import make_jobs
from windlass.sweep.sweep_file import SweepFolder


@pytest.mark.slow
def test_a_sweep_through_submitit_runs_each_trial_once(tmp_path: Path) -> None:
    request = made_request(executor="submitit-local", trials=2)
    jobs = make_jobs(request, SweepFolder(tmp_path, "made"), 1)

    trials = made_driver(tmp_path, request, jobs=jobs).run()

    assert [trial.state for trial in trials] == ["finished"] * 2
    assert all(trial.job for trial in trials)
    assert sorted(path.name for path in tmp_path.glob("made-*")) == ["made-0000", "made-0001"]
