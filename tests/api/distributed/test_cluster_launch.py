"""What starts a run on a cluster puts each device where its plan has it."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.api.distributed.cluster_launch import ranks_by_host, launch_script
from windlass.program.device_mesh import rank_of, mesh_coord
from windlass.schema.plan import Parallelism
from windlass.schema.tensor_grid import TensorGrid

DEGREES = st.sampled_from([1, 2, 4])
CUTS = st.builds(Parallelism, pipeline=DEGREES, tensor=DEGREES, replicas=DEGREES)


@given(CUTS, DEGREES)
def test_slices_of_a_layer_share_a_host_and_every_device_has_one_place(
    cut: Parallelism, times: int
):
    per_node = cut.tensor * times
    nodes = -(-cut.devices // per_node)
    if nodes * per_node != cut.devices:
        per_node, nodes = cut.tensor, cut.devices // cut.tensor
    found = ranks_by_host(nodes, per_node)
    assert sorted(rank for host in found for rank in host) == list(range(cut.devices))
    for host in found:
        for rank in host:
            place = mesh_coord(rank, cut)
            assert rank_of(place, cut) == rank
            slices = {rank_of(place._replace(tensor_rank=at), cut) for at in range(cut.tensor)}
            assert slices <= set(host)


@given(CUTS)
def test_stages_are_the_last_to_share_a_host(cut: Parallelism):
    """A host of one stage's devices has them all: only stages are on different hosts then."""
    per_node = cut.tensor * cut.data
    for stage, host in enumerate(ranks_by_host(cut.pipeline, per_node)):
        assert {mesh_coord(rank, cut).stage for rank in host} == {stage}


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_script_is_one_that_the_shell_reads_and_says_who_is_where(
    launcher: str, kind: str, tmp_path: Path
):
    cut = Parallelism(pipeline=2, tensor=2, data=2)
    text = launch_script(
        cut, tmp_path / "a run", "01a1-ff62", nodes=2, per_node=4, launcher=launcher, device_kind=kind
    )
    assert "#   host 1, rank 4 to 7: stage 1, slice 0 to 1, replica 0 to 1" in text
    assert "Warning" not in text
    shell = text.splitlines()[0].removeprefix("#!")
    checked = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert ("--gpus-per-node=4" in text) == (launcher == "slurm" and kind == "cuda")


def test_slices_that_reach_over_hosts_are_warned_of(tmp_path: Path):
    cut = Parallelism(tensor=4)
    text = launch_script(
        cut, tmp_path, "01a1-ff62", nodes=2, per_node=2, launcher="torchrun", device_kind="cpu"
    )
    assert "# Warning: 4 slices do not go into hosts of 2" in text


def test_a_grid_whose_rows_share_a_host_is_not_warned_of(tmp_path: Path):
    cut = Parallelism(tensor=TensorGrid(2, 2))
    text = launch_script(
        cut, tmp_path, "01a1-ff62", nodes=2, per_node=2, launcher="torchrun", device_kind="cpu"
    )
    assert "Warning" not in text
    assert "# Of 2x2 slices those of one row, which exchange most, share a host." in text
