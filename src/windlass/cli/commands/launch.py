"""`windlass launch`: prepare a run for a cluster, and write what starts it there."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.cli.console import ProgressBars, console
from windlass.cli.options import build_request
from windlass.errors import RequestError
from windlass.report.terminal.plan_tables import plan_table
from windlass.units import format_bytes, format_seconds

Flag = Annotated[bool, Parameter(negative="")]


def launch(
    model: str | None = None,
    *overrides: str,
    nodes: int,
    per_node: int = 1,
    torchrun: Flag = False,
    slurm: Flag = False,
    on: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
    runs: Path = api.RUNS,
    folder: Path | None = None,
) -> None:
    """Prepare a run on several hosts, and write the script that starts it there.

    Args:
        model: a name (`windlass models` lists them), or `file.py:function` of your own.
        overrides: `key=value`, such as `parallel.pipeline=2 parallel.data=4`.
        nodes: hosts.
        per_node: devices of each host.
        torchrun: write a script to run on each host.
        slurm: write a script for `sbatch`.
        on: the machine; `here` if not given.
        near: budget for the near memory of each device, such as `40GiB`.
        file: a request in TOML.
        runs: where run folders lie; all hosts must see it.
        folder: prepare this folder in place of a new one under `runs`.
    """
    if torchrun and slurm:
        raise RequestError("`--torchrun` and `--slurm` are two scripts; name one")
    request = build_request(model, overrides, on=on, memory=memory, file=file)
    with ProgressBars() as progress:
        planned = api.plan(request, progress=progress)
        script = api.prepare_cluster_run(
            planned,
            nodes=nodes,
            per_node=per_node,
            launcher="slurm" if slurm else "torchrun",
            root=runs,
            folder=folder,
            progress=progress,
        )
    console.print(plan_table(planned.plan, planned.graph))
    prediction = planned.prediction
    step, peak = format_seconds(prediction.step_seconds), prediction.peaks[0].peak_bytes
    console.print(f"[bold]predicted[/]    {step} a step, {format_bytes(peak)} at the peak\n")
    console.print(f"run     {script.parent}", soft_wrap=True)
    if slurm:
        console.print(f"start   sbatch {script}", soft_wrap=True)
    else:
        head = "" if nodes == 1 else "HEAD=one-of-the-hosts "
        console.print(f"start   {head}sh {script}   (on every host)", soft_wrap=True)
