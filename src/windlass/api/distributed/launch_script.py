"""The text of the scripts that start a prepared run: on each host, or through Slurm."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from windlass.child_processes import module_command
from windlass.errors import InputErrors, RequestError
from windlass.program import mesh_coord
from windlass.schema import LAUNCH_FILE, Parallelism, grid_columns

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
    sbatch_lines: tuple[str, ...] = ()
    """More options for `sbatch`, such as `--qos=long`."""


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

    Raises:
        InputErrors: the folder, or Python's path, cannot be named in a script.
    """
    require_plain_text({"the folder": str(job.folder), "the path of Python": sys.executable})
    script = shlex.quote(str(job.script))
    if job.nodes == 1:
        usage = f"# Run this on the host:\n#     sh {script}\n"
        place, setup = "", ""
    else:
        usage = (
            f"# Run this on each of the {job.nodes} hosts, all at about the same time, with "
            f"NODE_RANK=0 to {job.nodes - 1}:\n"
            f"#     HEAD=name-of-the-first-host NODE_RANK=0 sh {script}\n"
        )
        place = f""" \\
    --node-rank "$NODE_RANK" --head "$HEAD" --port "${{PORT:-{job.port}}}\""""
        setup = """\
: "${HEAD:?set it to the name or address of the host with NODE_RANK=0, the same on all}"
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}"
: "${NODE_RANK:?set it to 0 on the first host, to 1 on the second, and so on}"
"""
    if job.device_kind == "cpu":
        share = f"$(( ($(nproc) + {job.per_node - 1}) / {job.per_node} ))"
        setup += f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{share}}}"\n'
    notes = "".join(f"{f'# {line}'.rstrip()}\n" for line in _notes(job))
    return f"""#!/bin/sh
{usage}{notes}{setup}exec {shlex.join(module_command("windlass"))} host {_operand(job.folder)} \\
    --nodes {job.nodes} --per-node {job.per_node} --restarts "${{RESTARTS:-3}}"{place}
"""


def _operand(folder: Path) -> str:
    return shlex.quote(str(folder))


def slurm_script(job: ClusterJob, slurm: SlurmJob) -> str:
    """The text of the script for `sbatch`, which starts `host_script` on each host.

    Raises:
        InputErrors: all values that cannot stand in a script.
        RequestError: the job asks for fewer GPUs than the plan uses.
    """
    options = {"--time": slurm.time, "--partition": slurm.partition, "--account": slurm.account}
    lines = {f"--sbatch-line {index}": line for index, line in enumerate(slurm.sbatch_lines, 1)}
    require_plain_text({"the folder": str(job.folder)} | options | lines)
    script = shlex.quote(str(job.script))
    directives = "".join(f"#SBATCH {line}\n" for line in _directives(job, slurm))
    # Since Slurm 22.05 steps do not inherit this from the job.
    cpus = f" --cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else ""
    return f"""#!/bin/bash
{directives}\
# Submit this with `sbatch`, and again to resume. Slurm sends SIGUSR1 {slurm.grace_seconds} s before
# the job's time ends: the current step is completed and saved, and the job queues again.
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
PORT="${{PORT:-$(( {_FIRST_PORT} + SLURM_JOB_ID % {_PORTS} ))}}"
export HEAD PORT
NOTICE=
STEP=
# srun hands SIGUSR1 on to the hosts. It answers SIGTERM by killing them, so it must not get one.
trap 'SIGNAL=1; NOTICE=1; [ -z "$STEP" ] || kill -USR1 "$STEP"' USR1
trap 'SIGNAL=1' TERM
srun --ntasks-per-node=1 --kill-on-bad-exit=1{cpus} sh {script} &
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
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--signal=B:USR1@{slurm.grace_seconds}"
    # sbatch has no escape for these; without the option it writes where it was called.
    if not set('"\\%') & set(str(job.folder)):
        yield f'--output="{job.folder}/slurm-%j.out"'
    for line in slurm.sbatch_lines:
        if not line.startswith("-"):
            raise RequestError(
                f"`--sbatch-line` is {line!r}, no option of sbatch such as `--qos=long`"
            )
        yield line


def _sbatch_value(name: str, value: str) -> str:
    """A value as sbatch reads it: its options have words, quotes and comments of their own.

    Raises:
        RequestError: it holds more than one word.
    """
    if not value or set(value) & set("\"'\\#") or len(value.split()) != 1:
        raise RequestError(
            f"`--{name}` is {value!r}, which sbatch would not read as one word; "
            "use `--sbatch-line` for what needs quotes"
        )
    return value


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
        yield "Every host must see the run folder and this Python under the same paths. The first"
        yield f"host listens on HEAD, port PORT ({job.port}). Where host names do not resolve, set"
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
