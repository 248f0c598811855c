from hypothesis import given
from hypothesis import strategies as st

from windlass.program.device_mesh import MeshCoord, mesh_coord, rank_of
from windlass.schema.plan import Parallelism


@given(pipeline=st.integers(1, 4), tensor=st.integers(1, 4), replicas=st.integers(1, 4))
def test_every_rank_has_one_coordinate_and_every_coordinate_one_rank(
    pipeline: int, tensor: int, replicas: int
):
    cut = Parallelism(pipeline=pipeline, tensor=tensor, data=replicas)
    places = [mesh_coord(device, cut) for device in range(cut.devices)]
    assert len(set(places)) == cut.devices
    assert [rank_of(place, cut) for place in places] == list(range(cut.devices))


def test_tensor_parallel_ranks_are_adjacent():
    cut = Parallelism(pipeline=2, tensor=2, data=2)
    assert [mesh_coord(device, cut) for device in (0, 1)] == [
        MeshCoord(0, 0, 0),
        MeshCoord(0, 1, 0),
    ]
