from hypothesis import given, strategies as st

from windlass.program.device_mesh import MeshCoord, mesh_coord, rank_of
from windlass.schema.plan import Parallelism


@given(pipeline=st.integers(1, 4), tensor=st.integers(1, 4), replicas=st.integers(1, 4))
def test_every_rank_has_one_coordinate_and_every_coordinate_one_rank(
    pipeline: int, tensor: int, replicas: int
):
    parallel = Parallelism(pipeline=pipeline, tensor=tensor, data=replicas)
    coords = [mesh_coord(rank, parallel) for rank in range(parallel.devices)]
    assert len(set(coords)) == parallel.devices
    assert [rank_of(coord, parallel) for coord in coords] == list(range(parallel.devices))


def test_tensor_parallel_ranks_are_adjacent():
    parallel = Parallelism(pipeline=2, tensor=2, data=2)
    assert [mesh_coord(rank, parallel) for rank in (0, 1)] == [
        MeshCoord(0, 0, 0),
        MeshCoord(0, 1, 0),
    ]
