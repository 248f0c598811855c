"""`windlass launch`: prepares a run for a cluster and writes the script that starts it there."""

import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from windlass import api
from windlass.api import SEARCHED_PLAN, Flag, PlanOptions, build_plan
from windlass.cli.console import ProgressBars, console, print_answer, print_notes
from windlass.cli.plan_summary import print_predicted_plan
from windlass.errors import InputErrors


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StarterOptions:
    """What starts the processes on each host."""

    slurm: Flag = False
    """Write a script for `sbatch` too."""
    kubernetes: Flag = False
    """Write a JobSet for `kubectl` too."""
    kubeflow: Flag = False
    """Write a TrainJob for Kubeflow Trainer too."""
    ray: Flag = False
    """Write a Python script that starts the hosts by Ray Train too."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(StarterOptions):
    """Size of the cluster, and what starts its processes."""

    nodes: int
    """Number of hosts."""
    per_node: int = 1
    """Number of devices on each host."""
    rehearse: Flag = False
    """Also run the plan downscaled on this machine, and check it as `windlass check` does."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What the job asks Slurm, Kubernetes or Kubeflow for."""

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
    host_memory: str | None = None
    """Memory of each host or pod, such as `512G` for Slurm and `64Gi` for pods."""
    module: tuple[str, ...] = ()
    """Slurm: an environment module to load; may be repeated."""
    setup_line: tuple[str, ...] = ()
    """Slurm: a line of shell before the ranks start; may be repeated."""
    interface: str | None = None
    """Slurm: network interface of gloo and NCCL, such as `ib0`."""
    container: str | None = None
    """Slurm: image in which the ranks run."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Slurm: what runs the image."""
    sbatch_line: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = ()
    """Slurm: one more option for `sbatch`, such as `--sbatch-line=--qos=long`; may be repeated."""
    image: str | None = None
    """Kubernetes, Kubeflow: container image that has this version of Windlass."""
    volume_claim: str | None = None
    """Kubernetes, Kubeflow: persistent volume claim, mounted at the folder above the run folder."""


_NO_SCHEDULER_OPTIONS, _BY_HAND = SchedulerOptions(), StarterOptions()


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
        if options.plan is None:
            planned = api.on_default_stack(planned, progress=progress)
        script = api.launch(
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
    console.print(f"start   {_start(cluster, script)}", soft_wrap=True)
    if cluster.rehearse:
        with ProgressBars() as progress:
            small, changes = api.downscale_plan(planned.plan, planned.request, progress=progress)
            steps = small.request.train.steps
            checked = api.verified(small, changes, steps=steps, progress=progress)
        print_answer(checked, as_json=False)
        if checked.exit_code:
            sys.exit(checked.exit_code)


def export(
    run: str = "last",
    /,
    *overrides: str,
    to: str | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    nearest: Flag = False,
    on: str | None = None,
    masks: Path | None = None,
    ema: Flag = False,
    starter: StarterOptions = _BY_HAND,
    scheduler: SchedulerOptions = _NO_SCHEDULER_OPTIONS,
    runs: Path = api.RUNS,
    as_json: api.AsJson = False,
) -> None:
    """Write the weights of a run for other software, or a plan for another engine.

    Absent weights are zeros, adapters are merged. For example: `windlass export last --to
    hf:my-model`, or `windlass export plan.toml --to torchtitan -o handover`, whose `launch.sh`
    starts torchtitan on that plan.

    Args:
        run: Folder, name, the first characters of its id, or `last`; for an engine also the TOML
            file of a plan (`windlass plan --out`).
        overrides: For an engine: `key=value` of what a plan file leaves open, such as
            `train.steps=1000`.
        to: `hf:DIR` for a Hugging Face folder, `gguf:FILE` for llama.cpp, `peft:DIR` for the
            adapters alone (`hf`, `gguf` and `peft` make them in the run folder), one safetensors
            file, or an engine: `ENGINE` or `ENGINE@VERSION`, such as `torchtitan`.
        output: For an engine: the folder to write to.
        nearest: For an engine: where it cannot say the plan, write the nearest one that it can.
        on: For an engine: the machine, if it is another than the plan's.
        masks: The file of the masks of a sparse model, which `sparsity.mask=FILE` starts from.
        ema: Write the averages of the weights that a run with `train.ema` keeps.
        starter: For an engine: what starts it on each host.
        scheduler: What the job asks Slurm or Kubernetes for.
        runs: The folder that holds the run folders.
        as_json: Print the result as JSON.
    """
    job = _scheduler_job(starter, scheduler)
    answer = api.export(
        run, *overrides, to=to, output=output, nearest=nearest, on=on, masks=masks, ema=ema,
        root=runs, scheduler=job,
    )  # fmt: skip
    print_notes(answer.notes)
    print_answer(answer, as_json=as_json)


def _start(cluster: ClusterOptions, script: Path) -> str:
    """The command that starts a prepared run."""
    name = shlex.quote(str(script))
    if cluster.slurm:
        return f"sbatch --chdir={shlex.quote(str(script.parent))} {name}"
    if cluster.kubernetes:
        return f"kubectl apply -f {name}"
    if cluster.kubeflow:
        return f"kubectl create -f {name}"
    if cluster.ray:
        return f"python {name}"
    if cluster.nodes == 1:
        return f"sh {name}"
    return f"HEAD=name-of-the-first-host NODE_RANK=0 sh {name}   (on every host, with its own)"


def _scheduler_job(cluster: StarterOptions, options: SchedulerOptions) -> api.Scheduler | None:
    """The job that the options ask for; None if the user starts each host.

    Raises:
        InputErrors: all options that the job cannot have, or needs and lacks.
    """
    flags = [name for name in _OPTIONS if getattr(cluster, name)]
    given = {
        field.name
        for field in fields(options)
        if getattr(options, field.name) != getattr(_NO_SCHEDULER_OPTIONS, field.name)
    }
    allowed = {name for flag in flags for name in _OPTIONS[flag]}
    faults = [f"`{_flag(name)}` is for {_takers(name)}" for name in sorted(given - allowed)]
    if len(flags) > 1:
        named = " and ".join(f"`--{flag}`" for flag in flags)
        faults.append(f"{named} are {len(flags)} ways to start a run; choose one")
    if len(flags) == 1 and (cluster.kubernetes or cluster.kubeflow):
        missing = {"image", "volume_claim"} - given
        faults += [f"`--{flags[0]}` needs `{_flag(name)}`" for name in sorted(missing)]
    if faults:
        raise InputErrors(faults)
    if cluster.kubernetes or cluster.kubeflow:
        return api.KubernetesJob(
            kind="trainjob" if cluster.kubeflow else "jobset",
            image=str(options.image), volume_claim=str(options.volume_claim),
            cpus=options.cpus_per_task, gpus=options.gpus_per_node,
            host_memory=options.host_memory, grace_seconds=options.grace_seconds,
        )  # fmt: skip
    if not cluster.slurm:
        return api.RayJob() if cluster.ray else None
    return api.SlurmJob(
        time=options.time, partition=options.partition, account=options.account,
        cpus_per_task=options.cpus_per_task, gpus_per_node=options.gpus_per_node,
        grace_seconds=options.grace_seconds, host_memory=options.host_memory,
        modules=options.module, setup_lines=options.setup_line, interface=options.interface,
        container=options.container, container_runtime=options.container_runtime,
        sbatch_lines=options.sbatch_line,
    )  # fmt: skip


_COMMON = ("cpus_per_task", "gpus_per_node", "grace_seconds", "host_memory")
_PODS = (*_COMMON, "image", "volume_claim")
_SLURM = ("time", "partition", "account", "module", "setup_line", "interface", "container")
_OPTIONS = {
    "slurm": (*_COMMON, *_SLURM, "container_runtime", "sbatch_line"),
    "kubernetes": _PODS, "kubeflow": _PODS, "ray": (),
}  # fmt: skip
"""Options that each way to start a run has."""


def _takers(name: str) -> str:
    """The ways to start a run that have an option: `--slurm` only."""
    takers = [f"`--{flag}`" for flag, names in _OPTIONS.items() if name in names]
    return f"{takers[0]} only" if len(takers) == 1 else " or ".join(takers)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
