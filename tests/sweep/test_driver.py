"""The driver: packed processes, pruning, and what happens when it or a trial is killed."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import made_sweeps
import psutil
import pytest
from made_sweeps import made_driver, made_loss, made_request, predicted

from windlass.errors import InputErrors, PlanError, RecordError, RunInterrupted
from windlass.record import Catalog, RunQuery
from windlass.sweep.driver import SweepStatus, read_trials
from windlass.sweep.sweep_file import SweepFolder, Trial
from windlass.tracking import is_locked

SLOW_STEP = {"seconds": 0.01}


def processes_of(root: Path) -> list[psutil.Process]:
    # The attributes are read at once: a process of another test that ends meanwhile is left out.
    return [
        one
        for one in psutil.process_iter(["status", "cmdline"])
        if one.info["status"] != psutil.STATUS_ZOMBIE
        and str(root) in " ".join(one.info["cmdline"] or ())
    ]


def kill(process: psutil.Process) -> None:
    process.kill()
    process.wait(5)


def runs_in_record(root: Path) -> list[str]:
    with Catalog.open(root) as catalog:
        catalog.refresh()
        return sorted(row.folder.name for row in catalog.rows(RunQuery(filter='group = "made"')))


def made_values(trial: Trial) -> tuple[object, ...]:
    """The objective of a trial that nothing disturbs: the median of its last ten losses."""
    losses = [made_loss(trial.params["train.learning_rate"], step) for step in range(31, 41)]
    return (pytest.approx(sum(sorted(losses)[4:6]) / 2),)


def test_each_trial_is_one_run_of_the_group_and_has_its_objective(tmp_path: Path) -> None:
    trials = made_driver(tmp_path, made_request(trials=4)).run()

    assert [trial.state for trial in trials] == ["finished"] * 4
    assert runs_in_record(tmp_path) == [trial.run for trial in trials]
    assert [trial.values for trial in trials] == list(map(made_values, trials))
    assert read_trials(tmp_path, "made")[1] == trials


def test_no_more_trials_run_than_jobs_or_memory_allow(tmp_path: Path) -> None:
    most: list[int] = []

    def observe(status: SweepStatus) -> None:
        running = [trial for trial in status.trials if trial.state == "running"]
        most.append(len(running))
        assert sum(trial.predicted_bytes or 0 for trial in running) <= 5 * 2**20

    def sized(trial: Trial) -> Trial:
        return predicted(trial).model_copy(update={"predicted_bytes": 2 * 2**20})

    request = made_request(jobs=4, request=SLOW_STEP, trials=4)
    made_driver(tmp_path, request, observe=observe, predict=sized, capacity_bytes=5 * 2**20).run()

    assert max(most) == 2


def test_a_trial_that_cannot_fit_fails_at_once_with_its_sentence(tmp_path: Path) -> None:
    def too_large(trial: Trial) -> Trial:
        if trial.number == 1:
            raise PlanError("needs 3 TiB")
        size = 2**40 if trial.number == 2 else 2**20
        return predicted(trial).model_copy(update={"predicted_bytes": size})

    trials = made_driver(tmp_path, made_request(trials=4), predict=too_large).run()

    assert [trial.state for trial in trials] == ["finished", "failed", "failed", "finished"]
    assert trials[1].reason == "needs 3 TiB"
    assert trials[2].reason == "it needs 1.00 TiB (predicted), and this machine has 1.00 GiB"
    assert len(runs_in_record(tmp_path)) == 2


@pytest.mark.slow
def test_the_same_trials_are_pruned_with_one_job_and_with_three(tmp_path: Path) -> None:
    outcomes = []
    for jobs in (1, 3):
        request = made_request(
            pruner="halving", prune_from=4, trials=5, jobs=jobs, request={"seconds": 0.01},
        )  # fmt: skip
        trials = made_driver(tmp_path / str(jobs), request).run()
        outcomes.append([(trial.state, trial.pruned_at) for trial in trials])

    assert outcomes[0] == outcomes[1]
    assert ("pruned", 4) in outcomes[0]


def test_a_driver_killed_at_any_moment_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    request = made_request(trials=6, jobs=2, request={"seconds": 0.02})
    SweepFolder(tmp_path, "made").adopt(request)
    chance = random.Random(5)
    command = (sys.executable, made_sweeps.__file__, str(tmp_path), "made")
    outlived = False
    for attempt in range(8):  # later each time: a busy machine starts no trial in a second
        driver = subprocess.Popen(command)
        time.sleep((0.8 + chance.random() / 2) * max(1, attempt))
        driver.kill()
        driver.wait()
        outlived = outlived or bool(processes_of(tmp_path))
        if attempt and outlived:
            break
    assert outlived, "the trials outlive their driver"

    trials = made_driver(tmp_path, request).run()

    assert [trial.state for trial in trials] == ["finished"] * 6
    assert runs_in_record(tmp_path) == [trial.run for trial in trials]
    assert processes_of(tmp_path) == []
    assert [one.values for one in trials] == list(map(made_values, trials))


@pytest.mark.slow
def test_a_killed_trial_is_resumed_as_the_next_attempt_of_its_run(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_once(status: SweepStatus) -> None:
        if not killed and 0 in status.values and status.values[0].step > 3:
            killed.append(0)
            kill(processes_of(tmp_path)[0])

    request = made_request(trials=1, request={"seconds": 0.02})
    (trial,) = made_driver(tmp_path, request, observe=kill_once).run()

    assert (trial.state, trial.starts, trial.deaths) == ("finished", 2, 1)
    journals = sorted(path.name for path in (tmp_path / trial.run / "journal").iterdir())
    assert journals == ["0.1.j", "0.2.j"]


def test_a_trial_that_is_killed_again_and_again_fails(tmp_path: Path) -> None:
    def kill_all(status: SweepStatus) -> None:
        del status
        for process in processes_of(tmp_path):
            kill(process)

    request = made_request(trials=1, request=SLOW_STEP)
    (trial,) = made_driver(tmp_path, request, observe=kill_all).run()

    assert trial.state == "failed"
    assert "killed 3 times" in (trial.reason or "")


@pytest.mark.slow
def test_a_stop_lets_all_trials_save_and_end_and_the_next_start_goes_on(tmp_path: Path) -> None:
    request = made_request(trials=3, request={"seconds": 0.02})
    stops: list[bool] = []

    def observe(status: SweepStatus) -> None:
        if any(values.step > 2 for values in status.values.values()):
            stops.append(True)

    with pytest.raises(RunInterrupted, match="after 0 of 3 trials"):
        made_driver(tmp_path, request, observe=observe, stop=lambda: bool(stops)).run()
    assert processes_of(tmp_path) == []

    trials = made_driver(tmp_path, request).run()

    assert [trial.state for trial in trials] == ["finished"] * 3
    assert max(trial.starts for trial in trials) == 2


def test_a_process_of_an_earlier_start_does_nothing(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, "made")
    folder.adopt(made_request())
    rate = {"train.learning_rate": 1e-3}
    folder.save(Trial(number=0, params=rate, run="made-0000", starts=2))

    made_sweeps.write_run(tmp_path, "made", 0, start=1)

    assert not (tmp_path / "made-0000").exists()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_one_process_drives_a_sweep(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, "made")
    lock = folder.lock_driver()

    with pytest.raises(RecordError, match=r"is driven by process [0-9]+ already"):
        folder.lock_driver()

    lock.release()
    assert not is_locked(folder.path / "driver.lock")


def test_another_search_of_the_same_name_is_refused_key_by_key(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, "made")
    before = folder.adopt(made_request(trials=6, jobs=2))

    with pytest.raises(InputErrors) as caught:
        folder.adopt(made_request(seed=3, sampler="tpe"))

    assert len(caught.value.messages) == 2
    more = folder.adopt(made_request(trials=9, jobs=None))
    assert more == before.model_copy(update={"trials": 9})
    assert folder.request() == more
