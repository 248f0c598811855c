"""Runs in processes of their own, to be killed; called with the folder of their records.

The library is imported once. A run is forked for each line of its input, a list of overrides or
the folder of a run to resume. It prints its process id and its steps, and after it "ended" and its
exit code.
"""

import os
from pathlib import Path

import windlass
from forked_runs import fork_runs


def train(job: dict) -> None:
    os.environ |= job["env"]
    folder = Path(job["folder"])
    if (folder / "id").exists():
        run = windlass.resume(folder)
    else:
        run = windlass.train(job["model"], *job["overrides"], folder=folder)
    for step in run:
        print(step.step, step.loss.hex(), flush=True)


if __name__ == "__main__":
    fork_runs(train)
