"""Clusters: a run prepared in a folder that all hosts see, and the script that starts it there.

Windlass starts no process on another host. torch's launcher does, on each host, and tells every
process its rank; rank r is device r of the plan.
"""

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from windlass.api.machines import Progress
from windlass.api.plan import Planned
from windlass.api.runs import RUNS
from windlass.api.training.start_run import start_run
from windlass.atomic_files import atomic_write, storage_errors
from windlass.errors import PlanError
from windlass.program.device_mesh import mesh_coord
from windlass.schema import run_record as names
from windlass.schema.plan import Parallelism
from windlass.schema.tensor_grid import grid_columns

Launcher = Literal["torchrun", "slurm"]

_PORT = 29400
"""Where hosts meet unless a user says otherwise: torch's own default."""
_LINES = 16
_NOTICE_SECONDS = 300
"""Before a job's time ends: enough to end a step and to save."""


def prepare_cluster_run(
    planned: Planned,
    *,
    nodes: int,
    per_node: int,
    launcher: Launcher,
    root: Path | str = RUNS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Makes the folder of a run ready for a cluster, and writes the script that starts it there.

    Args:
        planned: of as many devices as there will be processes.
        nodes: hosts.
        per_node: devices of each.
        launcher: what starts the processes: `torchrun` on each host, or Slurm, which starts it.
        root: where run folders lie; every host must see it under the same path.
        folder: prepares this folder in place of a new one under `root`.
        progress: told how far preparations are.

    Returns:
        The script's path.

    Raises:
        PlanError: the plan is of another number of devices.
        WindlassError: what is wrong with the request, the data, the machine or the folder.
    """
    plan = planned.plan
    if plan.parallel.devices != nodes * per_node:
        raise PlanError(
            f"the plan is of {plan.parallel.devices} device{'s' if plan.parallel.devices > 1 else ''}, and "
            f"{nodes} hosts with {per_node} each have {nodes * per_node}; set `parallel.pipeline`, "
            "`parallel.tensor` and `parallel.data` so that their product is that"
        )
    held, _, tokens, _ = start_run(planned, root=root, folder=folder, progress=progress)
    with held:
        with storage_errors(held.path / names.TOKENS_FOLDER):
            shutil.copytree(tokens.folder, held.path / names.TOKENS_FOLDER)
        script = held.path / names.LAUNCH_FILE
        text = launch_script(
            plan.parallel, held.path.absolute(), held.id,
            nodes=nodes, per_node=per_node, launcher=launcher, device_kind=planned.machine.device.kind,
        )  # fmt: skip
        atomic_write(script, text)
        script.chmod(0o755)
        held.append_event("end", state="prepared", reason="")
    return script


def launch_script(
    parallelism: Parallelism,
    folder: Path,
    run_id: str,
    *,
    nodes: int,
    per_node: int,
    launcher: Launcher,
    device_kind: str,
) -> str:
    """What starts a prepared run.

    Args:
        cut: of the plan.
        folder: of the run, as every host sees it.
        run_id: of the run; processes of several runs meet under it.
        nodes: hosts.
        per_node: devices of each.
        launcher: what it is for.
        kind: of each device, as torch names it.
    """
    notes = "\n".join(f"# {line}".rstrip() for line in _notes(parallelism, nodes, per_node))
    store = f'"$HEAD:${{PORT:-{_PORT}}}"'
    device = f"-m windlass device {shlex.quote(str(folder))} --board {store}"
    python = shlex.quote(sys.executable)
    start = f"""{python} -m torch.distributed.run \\
    --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-id {run_id} \\
    --rdzv-endpoint {store} --max-restarts "${{RESTARTS:-3}}" \\
    ${{ADDR:+--local-addr "$ADDR" --rdzv-conf "is_host=$FIRST"}} {device}"""
    threads = ""
    if device_kind == "cpu":
        # torch's launcher would give each device one core where it starts several.
        share = f"$(( ($(nproc) + {per_node - 1}) / {per_node} ))"
        threads = f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{share}}}"\n'
    # The launcher's own store tells processes apart by how often their host began anew. Hosts may
    # differ in that (torch 2.13), and would then find addresses of processes that are gone.
    apart = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
    first = 'FIRST=0; [ "${ADDR:-}" = "$HEAD" ] && FIRST=1\n'
    if launcher == "torchrun":
        return f"""#!/bin/sh
# Run this on each of {_count(nodes, "host")}, all at about the same time:
#     HEAD=name-of-any-one-of-them sh {folder / names.LAUNCH_FILE}
{notes}
HEAD="${{HEAD:-{"localhost" if nodes == 1 else ""}}}"
: "${{HEAD:?set it to the name of one of the hosts, the same on all}}"
{threads}{apart}{first}exec {start}
"""
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device_kind == "cuda" else ""
    return f"""#!/bin/bash
#SBATCH --job-name=windlass-{run_id[-6:]}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --signal=TERM@{_NOTICE_SECONDS}
#SBATCH --output={folder}/slurm-%j.out
# Submit with `sbatch {folder / names.LAUNCH_FILE}`, and again to go on. Before the job's time ends
# Slurm sends SIGTERM: the step under way ends and is saved.
{notes}
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export HEAD
{threads}{apart}{first}srun {start}
"""


def ranks_by_host(nodes: int, per_node: int) -> tuple[range, ...]:
    """The devices of each host: torch's launcher gives it as many ranks as it has, in turn."""
    return tuple(range(node * per_node, (node + 1) * per_node) for node in range(nodes))


def _notes(cut: Parallelism, nodes: int, per_node: int) -> Iterator[str]:
    """Who is where, and what the start does."""
    yield ""
    yield "Rank r is device r. Slices of a layer are neighbours, then come replicas, then stages:"
    yield "what exchanges most stays inside a host, and stages pass the least between hosts."
    for node, devices in enumerate(ranks_by_host(nodes, per_node)[:_LINES]):
        found = [mesh_coord(device, cut) for device in devices]
        words = ", ".join(
            f"{name} {_span([place[at] for place in found])}"
            for at, name in enumerate(("stage", "slice", "replica"))
        )
        yield f"  host {node}, rank {_span(devices)}: {words}"
    if nodes > _LINES:
        yield f"  and so on, up to host {nodes - 1}"
    columns = grid_columns(cut.tensor)
    if columns > 1 and per_node % cut.tensor and per_node % columns == 0:
        yield f"Of {cut.tensor} slices those of one row, which exchange most, share a host."
    elif per_node % cut.tensor:
        yield f"Warning: {cut.tensor} slices do not go into hosts of {per_node} without a rest, so"
        yield "that some layers are computed across hosts. A degree that divides it is faster."
    yield ""
    yield "All hosts see the run's folder, and this Python, under the same paths. If a process"
    yield "fails, all begin anew from the last checkpoint, RESTARTS times at most. Started again"
    yield "after its end, this goes on from there too. PORT must be free on the host HEAD. Where"
    yield "names of hosts do not resolve, HEAD and each one's ADDR are addresses, and"
    yield "GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names the network."


def _span(numbers: Sequence[int]) -> str:
    """`2`, or `0 to 3`."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _count(count: int, name: str) -> str:
    return f"the {count} {name}s" if count > 1 else f"the one {name}"
