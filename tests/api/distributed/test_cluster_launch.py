"""The launch script of a cluster run, and the ranks that each host gets."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from windlass.api.distributed.cluster_launch import launch_script, ranks_by_host
from windlass.program.device_mesh import mesh_coord, rank_of
from windlass.schema.plan import Parallelism
from windlass.schema.tensor_grid import TensorGrid

DEGREES = st.sampled_from([1, 2, 4])
PARALLELISM = st.builds(Parallelism, pipeline=DEGREES, tensor=DEGREES, data=DEGREES)


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


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_script_is_valid_shell_and_lists_the_ranks_of_each_host(
    launcher: str, kind: str, tmp_path: Path
):
    parallelism = Parallelism(pipeline=2, tensor=2, data=2)
    text = launch_script(
        parallelism,
        tmp_path / "a run",
        "01a1-ff62",
        nodes=2,
        per_node=4,
        launcher=launcher,
        device_kind=kind,
    )
    assert (
        "#   host 1, rank 4 to 7: pipeline stage 1, tensor-parallel rank 0 to 1, "
        "data-parallel rank 0 to 1"
    ) in text
    assert "Warning" not in text
    shell = text.splitlines()[0].removeprefix("#!")
    checked = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert ("--gpus-per-node=4" in text) == (launcher == "slurm" and kind == "cuda")


def test_tensor_parallel_groups_that_cross_hosts_are_warned_of(tmp_path: Path):
    parallelism = Parallelism(tensor=4)
    text = launch_script(
        parallelism,
        tmp_path,
        "01a1-ff62",
        nodes=2,
        per_node=2,
        launcher="torchrun",
        device_kind="cpu",
    )
    assert "# Warning: tensor-parallel degree 4 does not divide the 2 devices of" in text


def test_a_grid_whose_rows_share_a_host_is_not_warned_of(tmp_path: Path):
    parallelism = Parallelism(tensor=TensorGrid(2, 2))
    text = launch_script(
        parallelism,
        tmp_path,
        "01a1-ff62",
        nodes=2,
        per_node=2,
        launcher="torchrun",
        device_kind="cpu",
    )
    assert "Warning" not in text
    assert "# Each row of the 2x2 tensor-parallel ranks, which communicates most" in text
