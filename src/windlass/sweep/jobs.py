"""The processes of a sweep's trials, on this machine or through submitit.

A process holds the lock of its trial as long as it lives, and refuses to work if the trial was
started again meanwhile. So whoever drives the sweep next knows which trials are running, whoever
started them.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil  # type: ignore[import-untyped]

from windlass.errors import RequestError
from windlass.sweep.sweep_file import SweepFolder, SweepRequest, Trial, lock_holder
from windlass.tracking import is_locked

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

_SPIN_COUNT = "1000"
"""Turns for which a thread of OpenMP looks for work before it sleeps; more of them keep a core from
the run beside it."""
_TIME_FACTOR, _MORE_MINUTES = 3.0, 30.0
"""Slurm is asked for so many times the predicted time, and so many minutes more."""
_MEMORY_FACTOR = 1.25
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
          "BOOT_FAIL", "DEADLINE", "REVOKED")  # fmt: skip
"""States of Slurm in which a job does nothing more."""


class Jobs(Protocol):
    """Starts and stops the processes of trials."""

    def start(self, trial: Trial, command: Sequence[str]) -> str | None:
        """Starts the process of a trial; returns the number of its job if it has one."""

    def is_alive(self, trial: Trial) -> bool:
        """Whether a process of the trial runs, or waits to run."""

    def stop(self, trial: Trial) -> None:
        """Asks the process of a trial to save and end."""

    def used_bytes(self, trial: Trial) -> int:
        """Memory that the processes of a trial have now; 0 if they are elsewhere."""


def make_jobs(request: SweepRequest, folder: SweepFolder, threads: int) -> Jobs:
    """What starts the trials of a sweep.

    Raises:
        RequestError: submitit is not installed.
    """
    if request.executor == "local":
        return LocalJobs(folder, threads)
    return SubmititJobs(folder, request, threads)


class LocalJobs:
    """Processes of this machine, each in a session of its own: they outlive the driver."""

    def __init__(self, folder: SweepFolder, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, trial: Trial, command: Sequence[str]) -> None:
        """Starts the process of a trial, with threads of its own."""
        environment = {"GOMP_SPINCOUNT": _SPIN_COUNT, **os.environ}
        with self._folder.log_file(trial.number).open("ab") as log:
            self._processes[trial.number] = subprocess.Popen(  # noqa: S603  our own words, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"OMP_NUM_THREADS": str(self._threads)},
                start_new_session=True,
            )

    def is_alive(self, trial: Trial) -> bool:
        """Whether the trial has a process, of this driver or of an earlier one."""
        process = self._processes.get(trial.number)
        if process is not None and process.poll() is None:
            return True
        return is_locked(self._folder.lock_file(trial.number))

    def stop(self, trial: Trial) -> None:
        """Asks the process of the trial to save and end, whoever started it."""
        process = self._process(trial)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)

    def used_bytes(self, trial: Trial) -> int:
        """Resident memory of the trial's processes."""
        process = self._process(trial)
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for one in [] if process is None else [process, *process.children(recursive=True)]:
                total += one.memory_info().rss
        return total

    def _process(self, trial: Trial) -> psutil.Process | None:
        """The process of a trial; None if it has none."""
        own = self._processes.get(trial.number)
        pid = own.pid if own is not None and own.poll() is None else None
        if pid is None:
            pid = lock_holder(self._folder.lock_file(trial.number))
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = None if pid is None else psutil.Process(pid)
            # A lock that was just taken may still name the process that had it before.
            if process is not None and self._folder.name in " ".join(process.cmdline()):
                return process
        return None


class SubmititJobs:
    """Jobs of Slurm, or of submitit's own local executor, which behaves like it."""

    def __init__(self, folder: SweepFolder, request: SweepRequest, threads: int) -> None:
        try:
            import submitit
        except ImportError:
            raise RequestError(
                f"executor `{request.executor}` needs submitit; install it with `pip install "
                "'windlass[sweep]'`"
            ) from None
        self._folder = folder
        self._request = request
        self._threads = threads
        self._local = LocalJobs(folder, threads)
        self._is_slurm = request.executor == "slurm"
        cluster = "slurm" if self._is_slurm else "local"
        self._executor: AutoExecutor = submitit.AutoExecutor(
            folder=str(self._logs), cluster=cluster
        )
        self._jobs: dict[int, Job[str]] = {}

    @property
    def _logs(self) -> Path:
        return self._folder.path / "submitit"

    def start(self, trial: Trial, command: Sequence[str]) -> str:
        """Submits the process of a trial, with the memory and time that it is predicted to need."""
        import submitit

        minutes = (trial.predicted_seconds or 0.0) / 60 * _TIME_FACTOR + _MORE_MINUTES
        gigabytes = (trial.predicted_bytes or 0) / 1e9 * _MEMORY_FACTOR
        self._executor.update_parameters(
            name=f"{self._folder.name}-{trial.number}",
            timeout_min=int(minutes),
            cpus_per_task=self._threads,
            **({"mem_gb": max(1.0, gigabytes)} if gigabytes else {}),
            **self._request.slurm,
        )
        variables = {"OMP_NUM_THREADS": str(self._threads), "GOMP_SPINCOUNT": _SPIN_COUNT}
        function = submitit.helpers.CommandFunction(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *command],
            verbose=False,
        )
        job = self._executor.submit(function)
        self._jobs[trial.number] = job
        return str(job.job_id)

    def is_alive(self, trial: Trial) -> bool:
        """Whether the trial's job waits or runs."""
        if is_locked(self._folder.lock_file(trial.number)):
            return True
        job = self._job(trial)
        if job is None:
            return False
        return not (job.state.startswith(_ENDED) if self._is_slurm else job.done())

    def stop(self, trial: Trial) -> None:
        """Cancels the trial's job; Slurm lets it save for as long as its `KillWait` is."""
        job = self._job(trial)
        if not self._is_slurm:
            self._local.stop(trial)
        elif job is not None:
            job.cancel(check=False)

    def used_bytes(self, trial: Trial) -> int:
        """Resident memory of processes that run here."""
        return 0 if self._is_slurm else self._local.used_bytes(trial)

    def _job(self, trial: Trial) -> "Job[str] | None":
        """The job of a trial, of this driver or of an earlier one."""
        import submitit

        if trial.number not in self._jobs and trial.job is not None:
            kind = submitit.SlurmJob if self._is_slurm else submitit.LocalJob
            self._jobs[trial.number] = kind(folder=self._logs, job_id=trial.job)
        return self._jobs.get(trial.number)
