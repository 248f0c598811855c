"""Runs in processes of their own, to be killed; called with the folder of their records.

The library is imported once. A run is forked for each line of its input, a list of overrides or
the folder of a run to resume. It prints its process id and its steps, and after it "ended" and its
exit code.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch

import windlass


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        run = os.fork()
        if run == 0:
            try:
                train(json.loads(line))
            except BaseException:  # noqa: BLE001  a forked process must not return
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(run, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


def train(job: dict) -> None:
    print("process", os.getpid(), flush=True)
    os.environ |= job["env"]
    folder = Path(job["folder"])
    if (folder / "id").exists():
        run = windlass.resume(folder)
    else:
        run = windlass.train(job["model"], *job["overrides"], folder=folder)
    for step in run:
        print(step.step, step.loss.hex(), flush=True)


if __name__ == "__main__":
    main()
