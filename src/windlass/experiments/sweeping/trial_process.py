"""The process of one trial of a sweep: trains it, or resumes it where an earlier process ended.

`python -m windlass.experiments.sweeping.trial_process ROOT NAME NUMBER START` does what the files
of the sweep say of that trial, unless it was started again meanwhile. It knows nothing of Optuna.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from windlass.errors import RecordError, RunInterrupted, WindlassError
from windlass.experiments.sweeping.trial_plan import plan_trial
from windlass.stop_signals import graceful_stop
from windlass.sweep import SweepFolder
from windlass.tracking import ID_FILE
from windlass.training import Run, resume, train


def run_trial(root: Path, name: str, number: int, start: int) -> int:
    """Runs a trial to its end, and returns an exit code.

    Args:
        root: the folder that holds the run folders.
        name: name of the sweep.
        number: number of the trial.
        start: how often it was started, this time included; a process of an earlier start does
            nothing.
    """
    folder = SweepFolder(root, name)
    try:
        lock = folder.lock_trial(number)
    except RecordError:  # another process runs it
        return 0
    try:
        if folder.trial(number).starts != start:
            return 0
        with graceful_stop() as stop:
            for _ in _open_run(folder, number, stop):
                pass
    except RunInterrupted as error:
        return error.exit_code
    except WindlassError as error:
        folder.note_error(number, str(error))
        return error.exit_code
    except Exception as error:
        folder.note_error(number, f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()
    return 0


def _open_run(folder: SweepFolder, number: int, stop: Callable[[], bool]) -> Run:
    """The run of a trial, new or from its newest checkpoint."""
    trial = folder.trial(number)
    run_folder = folder.run_folder(trial)
    if (run_folder / ID_FILE).is_file():
        return resume(run_folder, root=folder.root, stop=stop)
    planned = plan_trial(folder.request(), trial)
    return train(planned, root=folder.root, folder=run_folder, group=folder.name, stop=stop)


if __name__ == "__main__":
    exit_code = run_trial(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    sys.stderr.flush()
    # All files are closed, and taking torch apart takes a second of a core.
    os._exit(exit_code)
