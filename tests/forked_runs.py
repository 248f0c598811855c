"""Runs to be killed, in processes that are forked from one in which torch is imported already."""

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from power_cuts import without_power_cuts


def fork_runs(run: Callable[[Any], None], *, announced: bool = True) -> None:
    """Forks a run for each line of the input, and prints "ended" and its exit code after it.

    Args:
        run: what a forked process does with the line, which is JSON.
        announced: whether it prints "process" and its process id first.
    """
    torch.set_num_threads(1)
    share_imports()
    without_power_cuts()
    for line in sys.stdin:
        forked = os.fork()
        if forked == 0:
            code = 1
            try:
                if announced:
                    print("process", os.getpid(), flush=True)
                run(json.loads(line))
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:  # noqa: BLE001  a forked process must not return
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(forked, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


def share_imports(*modules: str) -> None:
    """Lets processes that are forked from this one share what it has imported.

    Torch's first backward pass imports sympy, which each of them would do again for a second; and
    a collector that looks at all objects would copy the memory that they are in.

    Args:
        modules: what they will import besides.
    """
    for module in ("torch.fx.experimental.symbolic_shapes", *modules):
        import_module(module)
    gc.collect()
    gc.freeze()


def beside_tests(surroundings: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables of a script that imports what tests share."""
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join(filter(None, (tests, surroundings.get("PYTHONPATH"))))
    return {**surroundings, "PYTHONPATH": paths}


@contextmanager
def forking_process(
    script: Path, surroundings: Mapping[str, str] = os.environ
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script which calls `fork_runs`."""
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=beside_tests(surroundings),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        with suppress(BrokenPipeError):  # what it was told last, and has not read
            process.stdin.close()
        process.stdout.close()
