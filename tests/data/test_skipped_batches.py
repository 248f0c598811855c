"""Batches that are left out."""

from itertools import count, islice

import pytest
from hypothesis import given, strategies as st

from windlass.data import batch_of_step
from windlass.errors import InputErrors
from windlass.schema import Request

RANGES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=6)


@given(ranges=RANGES)
def test_steps_take_the_batches_that_are_not_left_out_in_order(
    ranges: list[tuple[int, int]],
) -> None:
    left_out = {batch for first, more in ranges for batch in range(first, first + more + 1)}
    texts = [f"{first}-{first + more}" if more else str(first) for first, more in ranges]

    taken = [batch_of_step(step, texts) for step in range(1, 41)]

    assert taken == list(islice((batch for batch in count(1) if batch not in left_out), 40))


@pytest.mark.parametrize(
    ("text", "ranges"), [("7", ("7",)), ("7-9", ("7-9",)), ("7-9,12", ("7-9", "12"))]
)
def test_one_range_needs_no_list(text: str, ranges: tuple[str, ...]) -> None:
    request = Request.resolve(None, ["model.name=gpt-tiny", f"train.skip_batches={text}"])
    assert request.train.skip_batches == ranges


@pytest.mark.parametrize("text", ["0", "5-4", "-3", "a", "1-2-3", "1.5"])
def test_a_text_that_is_no_range_of_batches_is_refused(text: str) -> None:
    with pytest.raises(InputErrors, match="skip_batches"):
        Request.resolve(None, ["model.name=gpt-tiny", f"train.skip_batches={text}"])
