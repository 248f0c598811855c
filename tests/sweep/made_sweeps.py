"""Sweeps whose trials write the losses of a formula into a run folder, instead of training.

As a script it is the process of one trial: `made_sweeps.py ROOT NAME NUMBER START`.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from windlass.sweep.driver import Driver, SweepStatus, Workplace
from windlass.sweep.jobs import Jobs, LocalJobs
from windlass.sweep.sweep_file import SweepFolder, SweepRequest, Trial
from windlass.tracking import create_run_folder, reopen_run_folder

STEPS = 40


def made_request(**changes: object) -> SweepRequest:
    tree: dict[str, object] = {
        "name": "made", "space": {"train.learning_rate": "1e-4..1e-2:log"}, "sampler": "random",
        "trials": 6, "jobs": 2, **changes,
    }  # fmt: skip
    return SweepRequest.model_validate(tree)


def made_loss(rate: float, step: int) -> float:
    """Falls with the steps; the best learning rate is 1e-3."""
    return 4 / (1 + step) + abs(rate - 1e-3) * 1000


def predicted(trial: Trial) -> Trial:
    return trial.model_copy(
        update={"predicted_seconds": 1.0, "predicted_bytes": 2**20, "steps": STEPS}
    )


def made_driver(
    root: Path,
    request: SweepRequest,
    *,
    stop: Callable[[], bool] = lambda: False,
    observe: Callable[[SweepStatus], object] = lambda _: None,
    predict: Callable[[Trial], Trial] = predicted,
    capacity_bytes: int = 2**30,
    jobs: Jobs | None = None,
) -> Driver:
    folder = SweepFolder(root, request.name)
    request = folder.adopt(request)

    def command(trial: Trial) -> tuple[str, ...]:
        words = (str(root), request.name, str(trial.number), str(trial.starts))
        return (sys.executable, __file__, *words)

    workplace = Workplace(
        jobs=jobs or LocalJobs(folder, 1),
        most_jobs=request.jobs or 1,
        capacity_bytes=capacity_bytes,
        predict=predict,
        command=command,
    )
    return Driver(folder, request, workplace, stop=stop, observe=observe)


def write_run(root: Path, name: str, number: int, start: int) -> None:
    folder = SweepFolder(root, name)
    lock = folder.lock_trial(number)
    trial = folder.trial(number)
    if trial.starts != start:
        return
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    path = folder.run_folder(trial)
    meta = {"model": "made", "group": name, "steps": STEPS}
    is_new = not (path / "id").exists()
    run = (
        create_run_folder(root, "made", documents={}, meta=meta, folder=path)
        if is_new
        else reopen_run_folder(path, meta=meta)
    )
    rate = float(trial.params["train.learning_rate"])
    for step in range(1, STEPS + 1):
        time.sleep(folder.request().request.get("seconds", 0.0))
        run.journal.append_row(step, {"loss": made_loss(rate, step), "memory_bytes": 2.0**20})
        if stop.is_set():
            run.end("interrupted")
            return
    run.end("finished")
    lock.release()


def main(root: str, name: str) -> None:
    """Drives a sweep whose file is there, as a process that a test kills."""
    folder = SweepFolder(Path(root), name)
    lock = folder.lock_driver()
    made_driver(Path(root), folder.request()).run()
    lock.release()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(sys.argv[1], sys.argv[2])
    else:
        write_run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
