"""`windlass launch`: prepares a run for a cluster and writes the script that starts it there."""

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from windlass import api
from windlass.cli.command_options import SEARCHED_PLAN, Flag, PlanOptions, build_plan
from windlass.cli.console import ProgressBars, console, print_notes
from windlass.errors import RequestError
from windlass.report import plan_table
from windlass.units import format_bytes, format_seconds


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Size of the cluster, and what starts its processes."""

    nodes: int
    """Number of hosts."""
    per_node: int = 1
    """Number of devices on each host."""
    torchrun: Flag = False
    """Write a script to run on each host; the default."""
    slurm: Flag = False
    """Write a script for `sbatch`."""


def launch(
    model: str | None = None,
    *overrides: str,
    cluster: ClusterOptions,
    on: str | None = None,
    options: PlanOptions = SEARCHED_PLAN,
    runs: Path = api.RUNS,
    folder: Path | None = None,
) -> None:
    """Prepare a run on several hosts, and write the script that starts it there.

    For example: `windlass launch gpt2-124m parallel.data=8 --nodes 2 --per-node 4 --slurm`.

    Args:
        model: A name (`windlass models` lists them), or your own `file.py:function`.
        overrides: `key=value`, such as `parallel.pipeline=2 parallel.data=4`.
        cluster: Size of the cluster, and what starts its processes.
        on: The machine; `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        runs: The folder that holds the run folders; every host must see it.
        folder: Prepare this folder instead of a new one under `runs`.
    """
    if cluster.torchrun and cluster.slurm:
        raise RequestError("`--torchrun` and `--slurm` write different scripts; choose one")
    with ProgressBars() as progress:
        planned = build_plan(model, overrides, options, machine=on, progress=progress)
        script = api.prepare_cluster_run(
            planned,
            nodes=cluster.nodes,
            per_node=cluster.per_node,
            launcher="slurm" if cluster.slurm else "torchrun",
            root=runs,
            folder=folder,
            progress=progress,
        )
    print_notes(planned.notes)
    console.print(plan_table(planned.plan, planned.graph))
    prediction = planned.prediction
    step, peak = format_seconds(prediction.step_seconds), prediction.peaks[0].peak_bytes
    console.print(f"[bold]predicted[/]    {step} a step, {format_bytes(peak)} at the peak\n")
    console.print(f"run     {script.parent}", soft_wrap=True)
    if cluster.slurm:
        console.print(f"start   sbatch {script}", soft_wrap=True)
    else:
        head = "" if cluster.nodes == 1 else "HEAD=one-of-the-hosts "
        console.print(f"start   {head}sh {script}   (on every host)", soft_wrap=True)
