"""Prepares a run for a cluster: a folder that all hosts see, and a script that starts it there.

Windlass itself starts no process on another host. The user, Slurm or Kubernetes does.
"""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.atomic_files import atomic_write, storage_errors
from windlass.distributed.kubernetes_jobset import KubernetesJob, jobset, trainjob
from windlass.distributed.launch_script import (
    ClusterJob,
    RayJob,
    SlurmJob,
    host_script,
    ray_script,
    slurm_script,
)
from windlass.errors import PlanError
from windlass.jobs import RUNS, Planned, Progress, plan
from windlass.schema import (
    EXAMPLES_FILE,
    JOBSET_FILE,
    LAUNCH_FILE,
    LAUNCH_SECRET_FILE,
    RAY_FILE,
    SLURM_FILE,
    TOKENS_FOLDER,
    TRAINJOB_FILE,
    Request,
)
from windlass.tracking import RunFolder
from windlass.training import start_run

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset


Scheduler = SlurmJob | KubernetesJob | RayJob
"""What starts the hosts of a run."""


def launch(
    what: Planned | Request | str,
    *overrides: str,
    nodes: int,
    per_node: int = 1,
    scheduler: Scheduler | None = None,
    root: Path | str = RUNS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Prepares a run for a cluster: its folder, and the script or job that starts it there.

    Args:
        what: a model's name, a request, or the result of `plan` for `nodes * per_node` devices.
        overrides: `key=value`, if `what` is a name.
        nodes: number of hosts.
        per_node: number of devices on each host.
        scheduler: what starts the hosts, for which a file is written too; None if a user does.
        root: the folder that holds the run folders; every host must see it under the same path.
        folder: prepare this folder instead of a new one under `root`.
        progress: called with how far preparations are.

    Returns:
        The path of what the user starts or submits.

    Raises:
        PlanError: the plan is for another number of devices, or the run has several legs.
        WindlassError: what is wrong with the request, the data, the machine or the folder.
    """
    planned = what if isinstance(what, Planned) else plan(what, *overrides, progress=progress)
    parallel, sparsity = planned.plan.parallel, planned.request.sparsity
    if sparsity is not None and sparsity.legs > 1:
        raise PlanError(
            f"`sparsity.schedule` = {sparsity.schedule} plans anew in the middle of a run, which "
            "the ranks of several hosts cannot do yet; train on one host, or launch a run with "
            "`sparsity.schedule` = static, set or rigl"
        )
    if parallel.devices != nodes * per_node:
        devices = f"{parallel.devices} device{'s' if parallel.devices > 1 else ''}"
        raise PlanError(
            f"the plan is for {devices}, but {nodes} hosts with {per_node} each have "
            f"{nodes * per_node}; set `parallel.pipeline`, `parallel.tensor` and `parallel.data` "
            "so that their product is that number"
        )
    job = ClusterJob(
        parallelism=parallel,
        folder=(folder or Path(root)).absolute(),
        run_id="",
        nodes=nodes,
        per_node=per_node,
        device_kind=planned.machine.device.kind,
    )
    launch_texts(job, scheduler)  # refuses what cannot be written before there is a run folder
    from windlass.data import TokenDataset

    def fill(run: RunFolder, tokens: "TokenDataset | ExampleDataset") -> None:
        if isinstance(tokens, TokenDataset):
            with storage_errors(run.path / TOKENS_FOLDER):
                shutil.copytree(tokens.folder, run.path / TOKENS_FOLDER)
        elif tokens.content is not None:  # other examples are in the folder already
            with storage_errors(run.path / EXAMPLES_FILE):
                tokens.save(run.path / EXAMPLES_FILE)
        placed = replace(job, folder=run.path.absolute(), run_id=run.id)
        _write_secret(run.path / LAUNCH_SECRET_FILE)
        for name, text in launch_texts(placed, scheduler).items():
            atomic_write(run.path / name, text)
        placed.script.chmod(0o755)

    started = start_run(planned, root=root, folder=folder, progress=progress, fill=fill)
    with started.folder as run_folder:
        run_folder.append_event("end", state="prepared", reason="")
    return run_folder.path.absolute() / [*launch_texts(job, scheduler)][-1]


def launch_texts(job: ClusterJob, scheduler: Scheduler | None) -> Mapping[str, str]:
    """The text of each script, by its name; the last one is what the user starts or submits."""
    texts = {LAUNCH_FILE: host_script(job)}
    if isinstance(scheduler, SlurmJob):
        texts[SLURM_FILE] = slurm_script(job, scheduler)
    elif isinstance(scheduler, RayJob):
        texts[RAY_FILE] = ray_script(job)
    elif scheduler is not None and scheduler.kind == "jobset":
        texts[JOBSET_FILE] = jobset(job, scheduler)
    elif scheduler is not None:
        texts[TRAINJOB_FILE] = trainjob(job, scheduler)
    return texts


def _write_secret(path: Path) -> None:
    """Writes the prefix under which the hosts meet: nobody else can read or guess it."""
    with storage_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex())
