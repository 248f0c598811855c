"""Prepares a run for a cluster: a folder that all hosts see, and a script that starts it there.

Windlass itself starts no process on another host. torchrun does, on each host, and tells every
process its rank.
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
from windlass.program import mesh_coord
from windlass.schema import LAUNCH_FILE, TOKENS_FOLDER, Parallelism, grid_columns

Launcher = Literal["torchrun", "slurm"]
"""What a user starts: torchrun on each host, or one Slurm job, which starts torchrun."""

_PORT = 29400
"""Rendezvous port unless the user sets `PORT`; torchrun's own default."""
_HOSTS_LISTED = 16
_NOTICE_SECONDS = 300
"""Time between Slurm's SIGTERM and the end of the job: enough to end a step and to save."""


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
    """Creates the folder of a run for a cluster, and the script that starts the run there.

    Args:
        planned: a plan for `nodes * per_node` devices.
        nodes: number of hosts.
        per_node: number of devices on each host.
        launcher: what the user starts.
        root: the folder that holds the run folders; every host must see it under the same path.
        folder: prepare this folder instead of a new one under `root`.
        progress: called with how far preparations are.

    Returns:
        The script's path.

    Raises:
        PlanError: the plan is for another number of devices.
        WindlassError: what is wrong with the request, the data, the machine or the folder.
    """
    parallel = planned.plan.parallel
    if parallel.devices != nodes * per_node:
        devices = f"{parallel.devices} device{'s' if parallel.devices > 1 else ''}"
        raise PlanError(
            f"the plan is for {devices}, but {nodes} hosts with {per_node} each have "
            f"{nodes * per_node}; set `parallel.pipeline`, `parallel.tensor` and `parallel.data` "
            "so that their product is that number"
        )
    started = start_run(planned, root=root, folder=folder, progress=progress)
    run_folder, tokens = started.folder, started.tokens
    with run_folder:
        with storage_errors(run_folder.path / TOKENS_FOLDER):
            shutil.copytree(tokens.folder, run_folder.path / TOKENS_FOLDER)
        script = run_folder.path / LAUNCH_FILE
        text = launch_script(
            parallel,
            run_folder.path.absolute(),
            run_folder.id,
            nodes=nodes,
            per_node=per_node,
            launcher=launcher,
            device_kind=planned.machine.device.kind,
        )
        atomic_write(script, text)
        script.chmod(0o755)
        run_folder.append_event("end", state="prepared", reason="")
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
    """The text of the shell script that starts a prepared run.

    Args:
        parallelism: the plan's parallel degrees.
        folder: the run folder, as every host sees it.
        run_id: id of the run, which is also torchrun's rendezvous id.
        nodes: number of hosts.
        per_node: number of devices on each host.
        launcher: what the user starts.
        device_kind: torch's name for the type of device.
    """
    notes = "\n".join(f"# {line}".rstrip() for line in _notes(parallelism, nodes, per_node))
    setup, start = _rank_commands(
        folder, run_id, nodes=nodes, per_node=per_node, device_kind=device_kind
    )
    if launcher == "torchrun":
        return f"""#!/bin/sh
# Run this on each of {_count(nodes, "host")}, all at about the same time:
#     HEAD=name-of-any-one-of-them sh {folder / LAUNCH_FILE}
{notes}
HEAD="${{HEAD:-{"localhost" if nodes == 1 else ""}}}"
: "${{HEAD:?set it to the name of one of the hosts, the same on all}}"
{setup}exec {start}
"""
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device_kind == "cuda" else ""
    return f"""#!/bin/bash
#SBATCH --job-name=windlass-{run_id[-6:]}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --signal=TERM@{_NOTICE_SECONDS}
#SBATCH --output={folder}/slurm-%j.out
# Submit with `sbatch {folder / LAUNCH_FILE}`, and again to resume. Slurm sends SIGTERM
# before the job's time ends: the current step is completed and saved.
{notes}
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export HEAD
{setup}srun {start}
"""


def _rank_commands(
    folder: Path, run_id: str, *, nodes: int, per_node: int, device_kind: str
) -> tuple[str, str]:
    """Lines that set variables, and the command that starts the ranks of one host."""
    store = f'"$HEAD:${{PORT:-{_PORT}}}"'
    command = f"-m windlass rank {shlex.quote(str(folder))} --status-store {store}"
    python = shlex.quote(sys.executable)
    start = f"""{python} -m torch.distributed.run \\
    --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-id {run_id} \\
    --rdzv-endpoint {store} --max-restarts "${{RESTARTS:-3}}" \\
    ${{ADDR:+--local-addr "$ADDR" --rdzv-conf "is_host=$FIRST"}} {command}"""
    threads = ""
    if device_kind == "cpu":
        # torchrun would give each rank a single core if it starts several.
        share = f"$(( ($(nproc) + {per_node - 1}) / {per_node} ))"
        threads = f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{share}}}"\n'
    # torchrun's shared store separates attempts by each host's restart count. Hosts may disagree on
    # that count (torch 2.13), and would then find addresses of processes that are gone.
    unshared = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
    first = 'FIRST=0; [ "${ADDR:-}" = "$HEAD" ] && FIRST=1\n'
    return threads + unshared + first, start


def ranks_by_host(nodes: int, per_node: int) -> tuple[range, ...]:
    """The ranks of each host, `[node]`: torchrun numbers them host by host."""
    return tuple(range(node * per_node, (node + 1) * per_node) for node in range(nodes))


def _notes(parallelism: Parallelism, nodes: int, per_node: int) -> Iterator[str]:
    """Comment lines of the script: the rank layout, and what the script does."""
    yield ""
    yield "Tensor-parallel ranks are neighbours, then come data-parallel ranks, then pipeline"
    yield "stages: the most communication stays inside a host, the least crosses hosts."
    for node, ranks in enumerate(ranks_by_host(nodes, per_node)[:_HOSTS_LISTED]):
        stages, tensor_ranks, data_ranks = zip(
            *(mesh_coord(rank, parallelism) for rank in ranks), strict=True
        )
        yield (
            f"  host {node}, rank {_span(ranks)}: pipeline stage {_span(stages)}, "
            f"tensor-parallel rank {_span(tensor_ranks)}, data-parallel rank {_span(data_ranks)}"
        )
    if nodes > _HOSTS_LISTED:
        yield f"  and so on, up to host {nodes - 1}"
    yield from _tensor_parallel_notes(parallelism, per_node)
    yield ""
    yield "Every host must see the run folder and this Python under the same paths. If a process"
    yield "fails, all of them restart from the last checkpoint, at most RESTARTS times. Starting"
    yield "this script again after its end resumes the run too. PORT must be free on the host HEAD."
    yield "Where host names do not resolve, set HEAD and each host's ADDR to addresses, and"
    yield "GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) to the network interface."


def _tensor_parallel_notes(parallelism: Parallelism, per_node: int) -> Iterator[str]:
    """Whether tensor-parallel groups cross hosts."""
    degree, columns = parallelism.tensor, grid_columns(parallelism.tensor)
    if columns > 1 and per_node % degree and per_node % columns == 0:
        yield f"Each row of the {degree} tensor-parallel ranks, which communicates most, shares a"
        yield "host."
    elif per_node % degree:
        yield f"Warning: tensor-parallel degree {degree} does not divide the {per_node} devices of"
        yield "a host, so that some layers communicate across hosts. A degree that divides it is"
        yield "faster."


def _span(numbers: Sequence[int]) -> str:
    """`2`, or `0 to 3`."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _count(count: int, name: str) -> str:
    return f"the {count} {name}s" if count > 1 else f"the one {name}"
