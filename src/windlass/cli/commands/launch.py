"""`windlass launch`: prepares a run for a cluster and writes the script that starts it there."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.api import SEARCHED_PLAN, Flag, PlanOptions, build_plan
from windlass.cli.console import ProgressBars, console, print_notes
from windlass.cli.plan_summary import print_predicted_plan
from windlass.errors import InputErrors


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Size of the cluster, and what starts its processes."""

    nodes: int
    """Number of hosts."""
    per_node: int = 1
    """Number of devices on each host."""
    slurm: Flag = False
    """Write a script for `sbatch` too."""
    kubernetes: Flag = False
    """Write a JobSet for `kubectl` too."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What the job asks Slurm or Kubernetes for."""

    cpus_per_task: int | None = None
    """CPU cores for all ranks of a host; whole hosts if not given."""
    gpus_per_node: int | None = None
    """GPUs of each host; one for each device of the plan if not given."""
    grace_seconds: int = 120
    """Time in which the current step is completed and saved before the job ends."""
    time: str | None = None
    """Slurm: time limit, such as `12:00:00`."""
    partition: str | None = None
    """Slurm: partition."""
    account: str | None = None
    """Slurm: account that pays."""
    sbatch_line: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = ()
    """Slurm: one more option for `sbatch`, such as `--sbatch-line=--qos=long`; may be repeated."""
    image: str | None = None
    """Kubernetes: container image with this Python under the same path."""
    volume_claim: str | None = None
    """Kubernetes: persistent volume claim, mounted at the folder above the run folder."""
    host_memory: str | None = None
    """Kubernetes: memory of each pod, such as `64Gi`."""


_NO_SCHEDULER_OPTIONS = SchedulerOptions()


def launch(
    model: str | None = None,
    /,
    *overrides: str,
    cluster: ClusterOptions,
    scheduler: SchedulerOptions = _NO_SCHEDULER_OPTIONS,
    on: str | None = None,
    options: PlanOptions = SEARCHED_PLAN,
    runs: Path = api.RUNS,
    folder: Path | None = None,
) -> None:
    """Prepare a run on several hosts, and write the script that starts it there.

    For example: `windlass launch gpt2-124m parallel.data=8 --nodes 2 --per-node 4 --slurm`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `parallel.pipeline=2 parallel.data=4`; `windlass keys`
            lists all.
        cluster: Size of the cluster, and what starts its processes.
        scheduler: What the job asks Slurm or Kubernetes for.
        on: The machine (`windlass machines` lists them); `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        runs: The folder that holds the run folders; every host must see it.
        folder: Prepare this folder instead of a new one under `runs`.
    """
    job = _scheduler_job(cluster, scheduler)
    with ProgressBars() as progress:
        planned = build_plan(model, overrides, options, machine=on, progress=progress)
        script = api.prepare_cluster_run(
            planned,
            nodes=cluster.nodes,
            per_node=cluster.per_node,
            scheduler=job,
            root=runs,
            folder=folder,
            progress=progress,
        )
    print_notes(planned.notes)
    print_predicted_plan(planned)
    console.print(f"run     {script.parent}", soft_wrap=True)
    name = shlex.quote(str(script))
    if cluster.slurm:
        start = f"sbatch {name}"
    elif cluster.kubernetes:
        start = f"kubectl apply -f {name}"
    elif cluster.nodes == 1:
        start = f"sh {name}"
    else:
        start = f"HEAD=name-of-the-first-host NODE_RANK=0 sh {name}   (on every host, with its own)"
    console.print(f"start   {start}", soft_wrap=True)


def _scheduler_job(
    cluster: ClusterOptions, options: SchedulerOptions
) -> api.SlurmJob | api.KubernetesJob | None:
    """The job that the options ask for; None if the user starts each host.

    Raises:
        InputErrors: all options that the job cannot have, or needs and lacks.
    """
    given = {
        field.name
        for field in fields(options)
        if getattr(options, field.name) != getattr(_NO_SCHEDULER_OPTIONS, field.name)
    }
    common = {"cpus_per_task", "gpus_per_node", "grace_seconds"}
    of_slurm = {"time", "partition", "account", "sbatch_line"}
    of_kubernetes = given - of_slurm - common
    faults = [f"`{_flag(name)}` is for `--slurm` only" for name in sorted(given & of_slurm)]
    faults = [] if cluster.slurm else faults
    if not cluster.kubernetes:
        faults += [f"`{_flag(name)}` is for `--kubernetes` only" for name in sorted(of_kubernetes)]
    if not (cluster.slurm or cluster.kubernetes):
        faults += [
            f"`{_flag(name)}` is for `--slurm` or `--kubernetes`" for name in sorted(given & common)
        ]
    if cluster.slurm and cluster.kubernetes:
        faults.append("`--slurm` and `--kubernetes` are two ways to start a run; choose one")
    if cluster.kubernetes:
        missing = {"image", "volume_claim"} - given
        faults += [f"`--kubernetes` needs `{_flag(name)}`" for name in sorted(missing)]
    if faults:
        raise InputErrors(faults)
    if cluster.kubernetes:
        return api.KubernetesJob(
            image=str(options.image), volume_claim=str(options.volume_claim),
            cpus=options.cpus_per_task, gpus=options.gpus_per_node,
            host_memory=options.host_memory, grace_seconds=options.grace_seconds,
        )  # fmt: skip
    if not cluster.slurm:
        return None
    return api.SlurmJob(
        time=options.time, partition=options.partition, account=options.account,
        cpus_per_task=options.cpus_per_task, gpus_per_node=options.gpus_per_node,
        grace_seconds=options.grace_seconds, sbatch_lines=options.sbatch_line,
    )  # fmt: skip


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
