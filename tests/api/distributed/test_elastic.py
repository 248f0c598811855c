"""The parallel degrees with which a run continues once a device is lost."""

import pytest
from hypothesis import given, strategies as st

from windlass.distributed.elastic import fit_parallelism
from windlass.schema.plan import Parallelism
from windlass.schema.request import ResolvedRequest


def request(batch: int, micro: int | None = None) -> ResolvedRequest:
    train = {"batch": batch, "sequence": 64, "steps": 400}
    sizes = {"train": train, "batch": {} if micro is None else {"micro": micro}}
    return ResolvedRequest.model_validate(sizes)


def with_less(parallelism: Parallelism, asked: ResolvedRequest) -> Parallelism | None:
    """The degrees when one device at least is lost."""
    return fit_parallelism(parallelism, asked, range(parallelism.devices - 1, 0, -1))


@given(
    st.builds(Parallelism, pipeline=st.integers(1, 4), data=st.integers(1, 8)), st.integers(1, 64)
)
def test_the_data_parallel_degree_shrinks_to_the_largest_that_divides_the_batch(
    parallelism: Parallelism, batch: int
):
    smaller = with_less(parallelism, request(batch))
    if parallelism.data > 1:
        degrees = [data for data in range(1, parallelism.data) if batch % data == 0]
        assert smaller == parallelism.model_copy(update={"data": max(degrees)})
    elif parallelism.pipeline > 1:
        assert smaller == parallelism.model_copy(update={"pipeline": parallelism.pipeline - 1})
    else:
        assert smaller is None


@pytest.mark.parametrize(("micro", "left"), [(None, 3), (2, 3), (6, 2), (12, 1)])
def test_requested_micro_batches_stay_whole(micro: int | None, left: int):
    smaller = with_less(Parallelism(data=4), request(12, micro))
    assert smaller is not None
    assert smaller.data == left


@pytest.mark.parametrize(
    ("before", "devices", "after"),
    [
        (Parallelism(data=4), 3, Parallelism(data=3)),
        (Parallelism(data=4), 6, Parallelism(data=6)),
        (Parallelism(pipeline=2, data=2), 2, Parallelism(pipeline=2, data=1)),
        (Parallelism(pipeline=2, data=2), 3, Parallelism(pipeline=1, data=3)),
        (Parallelism(tensor=2, data=2), 2, Parallelism(tensor=2, data=1)),
        (Parallelism(tensor=2, data=2), 3, None),
        (Parallelism(data=4), 5, None),
    ],
)
def test_every_device_that_is_there_takes_an_equal_share_of_the_same_batch(
    before: Parallelism, devices: int, after: Parallelism | None
):
    assert fit_parallelism(before, request(12), (devices,)) == after
