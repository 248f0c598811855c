"""What a run goes on with once a device is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.api.distributed.elastic import shrink_parallelism
from windlass.schema.plan import Parallelism
from windlass.schema.request import Request


def asked(batch: int, micro: int | None = None) -> Request:
    words = {"train": {"batch": batch}, "batch": {} if micro is None else {"micro": micro}}
    return Request.model_validate(words)


@given(
    st.builds(Parallelism, pipeline=st.integers(1, 4), data=st.integers(1, 8)), st.integers(1, 64)
)
def test_as_many_replicas_are_left_as_divide_the_batch(cut: Parallelism, batch: int):
    found = shrink_parallelism(cut, asked(batch))
    if cut.data > 1:
        left = [each for each in range(1, cut.data) if batch % each == 0]
        assert found == cut.model_copy(update={"data": max(left)})
    elif cut.pipeline > 1:
        assert found == cut.model_copy(update={"pipeline": cut.pipeline - 1})
    else:
        assert found is None


@pytest.mark.parametrize(("micro", "left"), [(None, 3), (2, 3), (6, 2), (12, 1)])
def test_micro_batches_that_are_asked_for_stay_whole(micro: int | None, left: int):
    found = shrink_parallelism(Parallelism(data=4), asked(12, micro))
    assert found is not None
    assert found.data == left
