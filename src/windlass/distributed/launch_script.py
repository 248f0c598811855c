"""The text of the scripts that start a prepared run: on each host, or through Slurm."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

from windlass.errors import InputErrors, RequestError
from windlass.program import mesh_coord
from windlass.schema import LAUNCH_FILE, RAY_FILE, Parallelism, grid_columns

_HOSTS_LISTED = 16
_FIRST_PORT, _PORTS = 10240, 20000
"""Ports that neither the system (from 32768 on in Linux) nor known services choose."""
_GRACE_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What a Slurm job asks for; one Slurm task is all ranks of a host."""

    time: str | None = None
    """Time limit, such as `12:00:00`; the partition's if not given."""
    partition: str | None = None
    """Partition; the cluster's default if not given."""
    account: str | None = None
    """Account that pays; the user's default if not given."""
    cpus_per_task: int | None = None
    """CPU cores for all ranks of a host; whole hosts if not given."""
    gpus_per_node: int | None = None
    """GPUs of each host; one for each device of the plan if not given."""
    grace_seconds: int = _GRACE_SECONDS
    """Time before the end in which the current step is completed and saved."""
    host_memory: str | None = None
    """Memory of each host, such as `512G`; the partition's default if not given."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    setup_lines: tuple[str, ...] = ()
    """Lines of shell before the ranks start, such as `source /opt/windlass/bin/activate`."""
    interface: str | None = None
    """Network interface of gloo and NCCL; they choose one if not given."""
    container: str | None = None
    """Image in which each host's ranks run; none if not given."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What runs the image."""
    sbatch_lines: tuple[str, ...] = ()
    """More options for `sbatch`, such as `--qos=long`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """Hosts that Ray Train starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A prepared run and the hosts that it will run on."""

    parallelism: Parallelism
    """The plan's parallel degrees."""
    folder: Path
    """The run folder, as every host sees it; absolute."""
    run_id: str
    """The run's id."""
    nodes: int
    """Number of hosts."""
    per_node: int
    """Number of devices on each host."""
    device_kind: str
    """torch's name for the type of device."""
    command: str | None = None
    """What starts another engine on a host: its starter, its options for one of several hosts, and
    what it runs, a line each; None runs Windlass itself."""
    arguments: str | None = None
    """File beside the script whose lines are `"$@"` in the command."""

    @property
    def name(self) -> str:
        """The name of the job in Slurm and Kubernetes."""
        return f"windlass-{self.run_id[-6:]}"

    @property
    def port(self) -> int:
        """Port of the store on the first host unless `PORT` is set; derived from the run's id."""
        return _FIRST_PORT + crc32(self.run_id.encode()) % _PORTS

    @property
    def script(self) -> Path:
        """The script that starts the ranks of one host."""
        return self.folder / LAUNCH_FILE


def require_plain_text(values: Mapping[str, str | None]) -> None:
    """Checks that values can stand in a script, quoted.

    Args:
        values: the values, by what they are.

    Raises:
        InputErrors: all that hold a control character, or are no UTF-8.
    """
    faults = [
        f"{name} {value!r} holds a control character or is no UTF-8, and a "
        "script cannot name it; choose another"
        for name, value in values.items()
        if value is not None and not _is_plain(value)
    ]
    if faults:
        raise InputErrors(faults)


def _is_plain(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in value)


def host_script(job: ClusterJob) -> str:
    """The text of the shell script that starts the ranks of one host.

    It names no path: it finds the run folder beside itself, and Python by `PYTHON`.
    """
    if job.nodes == 1:
        usage = f"# Run this on the host:\n#     sh {LAUNCH_FILE}\n"
        place, setup, nodes, restarts = "", "", "1", "3"
    else:
        usage = (
            f"# Run this on each of the {job.nodes} hosts, all at about the same time, with "
            f"NODE_RANK=0 to {job.nodes - 1}:\n"
            f"#     HEAD=name-of-the-first-host NODE_RANK=0 sh {LAUNCH_FILE}\n"
            "# One worker of torchrun, Kubeflow or Ray on each host may run it: they set both. On\n"
            "# another number of hosts (NODES, or what torchrun has) the run is planned anew.\n"
        )
        nodes = f'"${{NODES:-${{GROUP_WORLD_SIZE:-{job.nodes}}}}}"'
        # An agent of torchrun that restarts does it with the hosts that are left.
        restarts = "$(( ${TORCHELASTIC_MAX_RESTARTS:-0} ? 0 : 3 ))"
        place = f""" \\
    --node-rank "$NODE_RANK" --head "$HEAD" --port "${{PORT:-{job.port}}}\""""
        setup = """\
HEAD="${HEAD:-${PET_MASTER_ADDR:-${MASTER_ADDR:-}}}"
: "${HEAD:?set it to the name or address of the host with NODE_RANK=0, the same on all}"
for RANK_OF_NODE in "$NODE_RANK" "$SLURM_NODEID" "$PET_NODE_RANK" "$GROUP_RANK" \\
    "$JOB_COMPLETION_INDEX"; do
    NODE_RANK="${NODE_RANK:-$RANK_OF_NODE}"
done
: "${NODE_RANK:?set it to 0 on the first host, to 1 on the second, and so on}"
"""
    if job.command is not None:
        return f"#!/bin/sh\n{usage}{setup}{_engine_lines(job)}"
    if job.device_kind == "cpu":
        share = f"$(( ($(nproc) + {job.per_node - 1}) / {job.per_node} ))"
        setup += f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{share}}}"\n'
    notes = "".join(f"{f'# {line}'.rstrip()}\n" for line in _notes(job))
    return f"""#!/bin/sh
{usage}{notes}{setup}RUN="$(cd -- "$(dirname -- "$0")" && pwd -P)"
PYTHON="${{PYTHON:-python3}}"
"$PYTHON" -P -c "import windlass" || {{
    echo "windlass: $PYTHON has no windlass here; activate its environment, or set PYTHON" >&2
    exit 2
}}
exec "$PYTHON" -P -m windlass host "$RUN" \\
    --nodes {nodes} --per-node {job.per_node} --restarts "${{RESTARTS:-{restarts}}}"{place}
"""


def _engine_lines(job: ClusterJob) -> str:
    """Lines that start the ranks of another engine on this host, from the folder of the script."""
    starter, place, command = str(job.command).splitlines()
    starter = starter.replace("PER_NODE", str(job.per_node)).replace("NODES", str(job.nodes))
    port, lines = "", [starter, command]
    if job.nodes > 1:
        port, lines = f'PORT="${{PORT:-{job.port}}}"\n', [starter, place, command]
    words = ""
    if job.arguments is not None:
        words = f"""\
set --
while IFS= read -r WORD; do set -- "$@" "$WORD"; done < "$RUN/{job.arguments}"
"""
    start = " \\\n    ".join(lines)
    return f"""\
RUN="$(cd -- "$(dirname -- "$0")" && pwd -P)"
{port}{words}cd -- "$RUN"
exec {start}
"""


def slurm_script(job: ClusterJob, slurm: SlurmJob) -> str:
    """The text of the script for `sbatch`, which starts `host_script` on each host.

    Raises:
        InputErrors: all values that cannot stand in a script.
        RequestError: the job asks for fewer GPUs than the plan uses.
    """
    options = {
        "--time": slurm.time, "--partition": slurm.partition, "--account": slurm.account,
        "--host-memory": slurm.host_memory, "--interface": slurm.interface,
        "--container": slurm.container,
    }  # fmt: skip
    several = {
        "--sbatch-line": slurm.sbatch_lines, "--module": slurm.modules,
        "--setup-line": slurm.setup_lines,
    }  # fmt: skip
    lines = {f"{name} {i}": line for name, lines in several.items() for i, line in enumerate(lines)}
    require_plain_text(options | lines)
    directives = "".join(f"#SBATCH {line}\n" for line in _directives(job, slurm))
    return f"""#!/bin/bash
{directives}\
# Submit this with `sbatch --chdir=RUN-FOLDER`, and again to resume. Slurm sends SIGUSR1
# {slurm.grace_seconds} s before the job's time ends: the step is completed and saved, and the job
# queues again. What rank 3 says stands in ranks/3.err, what its host says in slurm-JOB.out.
export RUN="${{RUN:-$PWD}}"
[ -f "$RUN/{LAUNCH_FILE}" ] || {{
    echo "windlass: $RUN has no {LAUNCH_FILE}; submit this with sbatch --chdir=RUN-FOLDER" >&2
    exit 2
}}
{"".join(_setup(slurm))}\
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
PORT="${{PORT:-$(( {_FIRST_PORT} + SLURM_JOB_ID % {_PORTS} ))}}"
export HEAD PORT
NOTICE=
STEP=
# srun hands SIGUSR1 on to the hosts. It answers SIGTERM by killing them, so it must not get one.
trap 'SIGNAL=1; NOTICE=1; [ -z "$STEP" ] || kill -USR1 "$STEP"' USR1
trap 'SIGNAL=1' TERM
srun {" ".join(_srun_words(slurm))} sh "$RUN/{LAUNCH_FILE}" &
STEP=$!
[ -z "$NOTICE" ] || kill -USR1 "$STEP"
SIGNAL=1
while [ -n "$SIGNAL" ]; do  # a signal ends `wait`, but not the step
    SIGNAL=
    wait "$STEP"
    CODE=$?
done
if [ -n "$NOTICE" ] && [ "$CODE" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
"""


def _setup(slurm: SlurmJob) -> Iterator[str]:
    """Lines before the ranks start: modules, environment, network, and NCCL's settings unset."""
    yield from (f"module load {shlex.quote(name)}\n" for name in slurm.modules)
    yield from (f"{line}\n" for line in slurm.setup_lines)
    if slurm.interface is not None:
        name = shlex.quote(slurm.interface)
        yield f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}\n"
    else:
        yield "# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0  # the interface to meet on\n"
    yield "# export NCCL_DEBUG=INFO  # says which links and plugins NCCL found\n"
    yield "# export NCCL_IB_HCA=mlx5  # the adapters to use\n"
    yield "# export NCCL_IB_DISABLE=1  # TCP in place of InfiniBand\n"


def _srun_words(slurm: SlurmJob) -> Iterator[str]:
    """The options of srun, and what stands before the command in a container."""
    yield "--ntasks-per-node=1 --kill-on-bad-exit=1"
    if slurm.cpus_per_task:  # since Slurm 22.05 steps do not inherit this from the job
        yield f"--cpus-per-task={slurm.cpus_per_task}"
    if slurm.container is None:
        return
    image = shlex.quote(slurm.container)
    if slurm.container_runtime == "pyxis":
        yield f'--container-image={image} --container-mounts="$RUN:$RUN"'
    else:
        yield f'apptainer exec --nv --bind "$RUN" {image}'


def _directives(job: ClusterJob, slurm: SlurmJob) -> Iterator[str]:
    """The options for `sbatch`."""
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    gpus = slurm.gpus_per_node or (job.per_node if job.device_kind == "cuda" else 0)
    if gpus and job.device_kind == "cuda" and gpus < job.per_node:
        raise RequestError(
            f"the plan uses {job.per_node} devices of each host, but `--gpus-per-node` is {gpus}; "
            f"ask for at least {job.per_node}"
        )
    yield from [f"--gpus-per-node={gpus}"] if gpus else []
    yield f"--cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else "--exclusive"
    for name in ("time", "partition", "account"):
        value = getattr(slurm, name)
        yield from [f"--{name}={_sbatch_value(name, value)}"] if value is not None else []
    if slurm.host_memory is not None:
        yield f"--mem={_sbatch_value('host-memory', slurm.host_memory)}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--signal=B:USR1@{slurm.grace_seconds}"
    yield "--output=slurm-%j.out"
    for line in slurm.sbatch_lines:
        if not line.startswith("-"):
            raise RequestError(
                f"`--sbatch-line` is {line!r}, no option of sbatch such as `--qos=long`"
            )
        yield line


def _sbatch_value(name: str, value: str) -> str:
    """A value as sbatch reads it: its options have words, quotes and comments of their own."""
    if not value or set(value) & set("\"'\\#") or len(value.split()) != 1:
        raise RequestError(
            f"`--{name}` is {value!r}, which sbatch would not read as one word; "
            "use `--sbatch-line` for what needs quotes"
        )
    return value


def ray_script(job: ClusterJob) -> str:
    """The text of a Python script that starts `host_script` on each host by Ray Train."""
    gpus = job.per_node if job.device_kind == "cuda" else 0
    return f'''"""Starts the hosts of this run as workers of Ray Train: `python {RAY_FILE}`."""

import os
import subprocess
import sys
from pathlib import Path

import ray.train
from ray.train.torch import TorchTrainer

RUN = Path(__file__).resolve().parent


def run_host() -> None:
    """Runs the ranks of one host."""
    rank = ray.train.get_context().get_world_rank()
    surroundings = {{
        **os.environ, "HEAD": os.environ["MASTER_ADDR"], "NODE_RANK": str(rank),
        "PYTHON": os.environ.get("PYTHON", sys.executable),
    }}
    subprocess.run(["sh", str(RUN / "{LAUNCH_FILE}")], env=surroundings, check=True)


if __name__ == "__main__":
    TorchTrainer(
        run_host,
        scaling_config=ray.train.ScalingConfig(
            num_workers={job.nodes}, use_gpu={gpus > 0},
            resources_per_worker={{"GPU": {gpus}}} if {gpus} else {{"CPU": {job.per_node}}},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(RUN.parent), name=f"{{RUN.name}}-ray",
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
'''


def ranks_by_host(nodes: int, per_node: int) -> tuple[range, ...]:
    """The ranks of each host, `[node]`: they are numbered host by host."""
    return tuple(range(node * per_node, (node + 1) * per_node) for node in range(nodes))


def _notes(job: ClusterJob) -> Iterator[str]:
    """Comment lines of the script: the rank layout, and what the script does."""
    yield ""
    yield "Tensor-parallel ranks are neighbours, then come data-parallel ranks, then pipeline"
    yield "stages: the most communication stays inside a host, the least crosses hosts."
    for node, ranks in enumerate(ranks_by_host(job.nodes, job.per_node)[:_HOSTS_LISTED]):
        stages, tensor_ranks, data_ranks = zip(
            *(mesh_coord(rank, job.parallelism) for rank in ranks), strict=True
        )
        yield (
            f"  host {node}, rank {_span(ranks)}: pipeline stage {_span(stages)}, "
            f"tensor-parallel rank {_span(tensor_ranks)}, data-parallel rank {_span(data_ranks)}"
        )
    if job.nodes > _HOSTS_LISTED:
        yield f"  and so on, up to host {job.nodes - 1}"
    yield from _tensor_parallel_notes(job.parallelism, job.per_node)
    yield ""
    yield "If a process fails, all of them restart from the last checkpoint, at most RESTARTS times"
    yield "(3). Starting this script again after its end resumes the run too. SIGTERM and SIGUSR1"
    yield "let the current step end and save it."
    if job.nodes > 1:
        yield "Every host must see this folder, and have this Windlass: `python3`, or PYTHON. The"
        yield f"first host listens on HEAD, port PORT ({job.port}). Where names do not resolve, set"
        yield "HEAD to an address, and GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) on each host to"
        yield "the network interface. Use a private network: whoever reaches these ports can stop"
        yield "the run or falsify it."


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
