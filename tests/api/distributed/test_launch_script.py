"""The launch script of a host, the Slurm script around it, and the ranks that each host gets."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from windlass.distributed.launch_script import (
    ClusterJob,
    SlurmJob,
    host_script,
    ranks_by_host,
    ray_script,
    slurm_script,
)
from windlass.errors import InputErrors, RequestError
from windlass.program.device_mesh import mesh_coord, rank_of
from windlass.schema.plan import Parallelism
from windlass.schema.tensor_grid import TensorGrid

DEGREES = st.sampled_from([1, 2, 4])
PARALLELISM = st.builds(Parallelism, pipeline=DEGREES, tensor=DEGREES, data=DEGREES)
HOSTILE = 'it\'s "a" $(touch hit) `touch hit`; * \\ %j é'
"""A folder name that a shell or sbatch would read otherwise than it stands."""


def job(folder: Path, *, nodes: int = 2, per_node: int = 4, **more: object) -> ClusterJob:
    defaults = {
        "parallelism": Parallelism(pipeline=2, tensor=2, data=2), "run_id": "01a1-ff62",
        "device_kind": "cpu",
    }  # fmt: skip
    return ClusterJob(folder=folder, nodes=nodes, per_node=per_node, **{**defaults, **more})  # type: ignore[arg-type]


@given(PARALLELISM, DEGREES)
def test_tensor_parallel_ranks_share_a_host_and_every_rank_has_one_coordinate(
    parallelism: Parallelism, times: int
):
    per_node = parallelism.tensor * times
    nodes = -(-parallelism.devices // per_node)
    if nodes * per_node != parallelism.devices:
        per_node, nodes = parallelism.tensor, parallelism.devices // parallelism.tensor
    hosts = ranks_by_host(nodes, per_node)
    assert sorted(rank for host in hosts for rank in host) == list(range(parallelism.devices))
    for host in hosts:
        for rank in host:
            coord = mesh_coord(rank, parallelism)
            assert rank_of(coord, parallelism) == rank
            group = {
                rank_of(coord._replace(tensor_rank=tensor_rank), parallelism)
                for tensor_rank in range(parallelism.tensor)
            }
            assert group <= set(host)


@given(PARALLELISM)
def test_pipeline_stages_are_the_first_to_be_split_over_hosts(parallelism: Parallelism):
    """With as many devices a host as a stage has, each host runs one stage."""
    per_node = parallelism.tensor * parallelism.data
    for stage, host in enumerate(ranks_by_host(parallelism.pipeline, per_node)):
        assert {mesh_coord(rank, parallelism).stage for rank in host} == {stage}


def test_the_script_lists_the_ranks_of_each_host(tmp_path: Path):
    text = host_script(job(tmp_path))
    assert (
        "#   host 1, rank 4 to 7: pipeline stage 1, tensor-parallel rank 0 to 1, "
        "data-parallel rank 0 to 1"
    ) in text
    assert "Warning" not in text


def test_tensor_parallel_groups_that_cross_hosts_are_warned_of(tmp_path: Path):
    text = host_script(job(tmp_path, parallelism=Parallelism(tensor=4), per_node=2))
    assert "# Warning: tensor-parallel degree 4 does not divide the 2 devices of" in text


def test_a_grid_whose_rows_share_a_host_is_not_warned_of(tmp_path: Path):
    text = host_script(job(tmp_path, parallelism=Parallelism(tensor=TensorGrid(2, 2)), per_node=2))
    assert "Warning" not in text
    assert "# Each row of the 2x2 tensor-parallel ranks, which communicates most" in text


def test_another_run_has_another_port(tmp_path: Path):
    ports = {job(tmp_path, run_id=f"01a1-{number}").port for number in range(20)}
    assert len(ports) > 15
    assert all(1024 < port < 32768 for port in ports)


def outer_world(folder: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH begins with these shell scripts."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_hostile_folder_name_reaches_windlass_unchanged_and_runs_nothing(
    tmp_path: Path,
):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    surroundings = outer_world(
        tmp_path / "bin", python='for word; do echo "$word"; done',
        srun='for word; do last="$word"; done; SLURM_NODEID=1 exec sh "$last"',
        scontrol="echo first; echo second",
    ) | {"SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7", "PYTHON": "python"}  # fmt: skip
    hostile = job(folder)
    hostile.script.write_text(host_script(hostile))
    script = tmp_path / "slurm.sh"
    script.write_text(slurm_script(hostile, SlurmJob()))
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    done = subprocess.run(
        ["bash", str(script)], env=surroundings, cwd=folder, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[words.index("host") + 1] == str(folder)
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--head") + 1] == "first"
    assert words[words.index("--port") + 1] == str(10240 + 7)
    assert not list(tmp_path.rglob("hit"))


def test_slurm_options_stand_in_the_script_as_sbatch_reads_them(tmp_path: Path):
    text = slurm_script(
        job(tmp_path, device_kind="cuda"),
        SlurmJob(
            time="12:00:00", partition="gpu", account="X", cpus_per_task=8, gpus_per_node=8,
            grace_seconds=90, host_memory="512G", sbatch_lines=("--qos=long", "--mail-type=END"),
        ),
    )  # fmt: skip
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options[2:] == [
        "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=8", "--time=12:00:00",
        "--partition=gpu", "--account=X", "--mem=512G", "--requeue", "--open-mode=append",
        "--signal=B:USR1@90", "--output=slurm-%j.out", "--qos=long", "--mail-type=END",
    ]  # fmt: skip
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpus-per-task=8 sh " in text


def test_a_job_has_the_modules_the_network_and_the_container_that_it_is_given(tmp_path: Path):
    given = SlurmJob(
        modules=("cuda/12.8", "nccl"), setup_lines=("source /opt/w/bin/activate",),
        interface="ib0", container="registry/image:1",
    )  # fmt: skip
    lines = slurm_script(job(tmp_path), given).splitlines()
    assert [*lines].index("module load cuda/12.8") < lines.index("source /opt/w/bin/activate")
    assert "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in lines
    assert any(line.startswith("# export NCCL_DEBUG=") for line in lines)
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert '--container-image=registry/image:1 --container-mounts="$RUN:$RUN" sh' in srun
    other = slurm_script(job(tmp_path), replace(given, container_runtime="apptainer"))
    assert 'apptainer exec --nv --bind "$RUN" registry/image:1 sh "$RUN/launch.sh" &' in other


def test_no_script_names_a_path_of_the_machine_that_prepares_it(tmp_path: Path):
    prepared = job(tmp_path, device_kind="cuda")
    for text in (host_script(prepared), slurm_script(prepared, SlurmJob()), ray_script(prepared)):
        assert str(tmp_path) not in text
        assert sys.prefix not in text


def test_a_host_without_windlass_says_so_and_what_to_do(tmp_path: Path):
    prepared = job(tmp_path, nodes=1)
    prepared.script.write_text(host_script(prepared))
    surroundings = outer_world(tmp_path / "bin", bare="exit 1") | {"PYTHON": "bare"}
    done = subprocess.run(
        ["sh", str(prepared.script)], env=surroundings, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "bare has no windlass here; activate its environment, or set PYTHON" in done.stderr


@pytest.mark.parametrize(
    ("head", "rank"),
    [
        ("HEAD", "NODE_RANK"), ("MASTER_ADDR", "GROUP_RANK"),
        ("PET_MASTER_ADDR", "PET_NODE_RANK"), ("PET_MASTER_ADDR", "JOB_COMPLETION_INDEX"),
    ],
)  # fmt: skip
def test_a_host_takes_its_place_from_whatever_starts_it(tmp_path: Path, head: str, rank: str):
    prepared = job(tmp_path)
    prepared.script.write_text(host_script(prepared))
    surroundings = outer_world(tmp_path / "bin", python='[ "$2" = -c ] || echo "$@"')
    surroundings |= {"PYTHON": "python", head: "first", rank: "1"}
    done = subprocess.run(
        ["sh", str(prepared.script)], env=surroundings, capture_output=True, text=True, check=True
    )
    assert "--node-rank 1 --head first --port " in done.stdout


def test_ray_starts_one_worker_on_each_host(tmp_path: Path):
    text = ray_script(job(tmp_path, device_kind="cuda"))
    compile(text, "ray_train.py", "exec")
    assert "num_workers=2, use_gpu=True" in text
    assert '{"GPU": 4}' in text


def test_a_value_with_a_line_break_is_refused_with_all_others(tmp_path: Path):
    with pytest.raises(InputErrors) as refused:
        slurm_script(
            job(tmp_path), SlurmJob(account="x\ny", modules=("a\nb",), sbatch_lines=("--a\0",))
        )
    assert len(refused.value.messages) == 3


@pytest.mark.parametrize("value", ["a b", "", 'a"b', "a#b"])
def test_a_value_that_sbatch_would_read_as_something_else_is_refused(tmp_path: Path, value: str):
    with pytest.raises(RequestError, match="--partition"):
        slurm_script(job(tmp_path), SlurmJob(partition=value))


def run_slurm_script(
    folder: Path, surroundings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs the script of a job in bash, which finds the stand-ins first."""
    prepared = job(folder)
    prepared.script.write_text(host_script(prepared))
    return subprocess.run(
        ["bash", "-c", slurm_script(prepared, SlurmJob())],
        cwd=folder, env=surroundings, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("code", "requeued"), [(130, True), (0, False), (1, False)])
def test_a_job_queues_again_if_its_notice_has_interrupted_the_run(
    tmp_path: Path, code: int, requeued: bool
):
    """The stand-in for `srun` hands the signal on, as srun does, and needs some time to save."""
    surroundings = outer_world(
        tmp_path / "bin",
        srun=f"trap 'sleep 0.1; echo saved; exit {code}' USR1; sleep 0.1; kill -USR1 $PPID\n"
        "while :; do sleep 0.02; done",
        scontrol='echo "$@"',
    ) | {"SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7"}  # fmt: skip
    done = run_slurm_script(tmp_path, surroundings)
    assert done.returncode == code, done.stderr
    assert done.stdout == "saved\n" + ("requeue 7\n" if requeued else "")


def test_sigterm_for_the_batch_script_leaves_the_hosts_time_to_save(tmp_path: Path):
    surroundings = outer_world(
        tmp_path / "bin",
        srun="trap 'exit 99' TERM; sleep 0.1; kill -TERM $PPID; sleep 0.1; echo saved; exit 130",
        scontrol='echo "$@"',
    ) | {"SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7"}  # fmt: skip
    done = run_slurm_script(tmp_path, surroundings)
    assert (done.returncode, done.stdout) == (130, "saved\n")
