"""One process that runs checks of one group and tells its parent of each, a JSON line each.

`python -m windlass.doctor.check_worker TASK`, where TASK is a `WorkerTask` as JSON. A process
of its own, because a faulty kernel may end it, or leave a GPU of which nothing works any more.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TextIO

import torch

from windlass.doctor.findings import (
    Check,
    ChecksOfGroup,
    Finding,
    NotAvailableError,
    WorkerTask,
)
from windlass.errors import WindlassError
from windlass.hardware import core_count
from windlass.runtime import ParentProcess
from windlass.schema import CheckGroup, DoctorCheck, DoctorSystem
from windlass.torch_ext import accelerator_device
from windlass.tracking import processor_name, without_personal_data

_LONGEST_REASON = 400
_TORCH_COMMIT = "git_version"
"""The name in `torch.version` of what is no library."""


def main() -> None:
    """Runs the checks of the task in the first argument."""
    # What libraries print, as NCCL does, must not come between the lines for the parent.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ParentProcess()
    if sys.argv[1] == "system":
        _tell(out, "system", _system().model_dump(mode="json"))
        return
    task = WorkerTask.model_validate_json(sys.argv[1])
    torch.manual_seed(0)
    checks = _checks_of(task.group)(task, lambda *bar: _tell(out, "progress", bar))
    _tell(out, "names", [check.name for check in checks])
    for check in checks[task.first :]:
        result = run_check(check, task)
        _tell(out, "result", result.model_dump(mode="json"))
        if result.status == "failed":
            # The parent goes on with a new process: this one may be in any state.
            break
    # Without leaving groups, in which a rank may wait for one that is gone.
    out.flush()
    os._exit(0)


def run_check(check: Check, task: WorkerTask) -> DoctorCheck:
    """The outcome of one check; what it raises is its failure."""
    start = time.perf_counter()
    finding = Finding("")
    status, detail, way_out = "ok", "", None
    try:
        finding = check.run()
        detail, way_out = finding.detail, finding.slow
        status = "slow" if finding.slow else "ok"
    except NotAvailableError as error:
        status, detail = "skipped", str(error)
    except Exception as error:  # noqa: BLE001  a failing check stops no other
        status, detail, way_out = "failed", _reason(error), check.way_out
    return DoctorCheck.model_validate(
        {
            "group": task.group, "name": check.name, "device": task.label, "status": status,
            "seconds": time.perf_counter() - start, "detail": detail,
            "way_out": way_out, "rings": finding.rings, "measurement": finding.measurement,
        }
    )  # fmt: skip


def _reason(error: Exception) -> str:
    """What went wrong, in one line and without what names a person or a machine."""
    text = " ".join(str(error).split()) or "no reason was given"
    if not isinstance(error, WindlassError):
        text = f"{type(error).__name__}: {text}"
    return without_personal_data(text)[:_LONGEST_REASON]


def _checks_of(group: CheckGroup) -> ChecksOfGroup:
    """What makes the checks of a group."""
    from windlass.doctor.kernel_checks import kernel_checks
    from windlass.doctor.memory_checks import memory_checks
    from windlass.doctor.rank_checks import rank_checks
    from windlass.doctor.run_checks import machine_checks, plan_checks, step_checks

    groups: dict[CheckGroup, ChecksOfGroup] = {
        "kernels": kernel_checks, "memory": memory_checks, "ranks": rank_checks,
        "machine": machine_checks, "plans": plan_checks, "steps": step_checks,
    }  # fmt: skip
    return groups[group]


def _system() -> DoctorSystem:
    device = accelerator_device()
    return DoctorSystem(
        windlass=metadata.version("windlass"),
        python=platform.python_version(),
        torch=torch.__version__,
        libraries=dict(_libraries(device.kind)),
        processor=processor_name(),
        cores=core_count(),
        kind=device.kind,
        accelerators=tuple(_accelerators(device.kind, device.count())),
    )


def _libraries(kind: str) -> Iterator[tuple[str, str]]:
    """Versions of the libraries that torch was built with, and of those that it has loaded."""
    for name, version in vars(torch.version).items():
        if isinstance(version, str) and not name.startswith("_") and name != _TORCH_COMMIT:
            yield name, version
    cudnn: Callable[[], int | None] = torch.backends.cudnn.version
    if kind != "cpu" and (number := cudnn()) is not None:
        yield "cudnn", str(number)
    collectives = getattr(torch.get_device_module(kind), "nccl", None)
    if collectives is not None:
        yield "nccl", ".".join(map(str, collectives.version()))


def _accelerators(kind: str, count: int) -> Iterator[str]:
    """The model of each accelerator; none on a CPU."""
    module = torch.get_device_module(kind)
    for index in range(count if kind != "cpu" else 0):
        name = getattr(module, "get_device_name", None)
        yield str(name(index)) if name is not None else kind


def _tell(out: TextIO, kind: str, value: object) -> None:
    out.write(json.dumps([kind, value]) + "\n")


if __name__ == "__main__":
    main()
