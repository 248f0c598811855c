"""Micro-batches that a thread reads ahead."""

from collections.abc import Sequence

import numpy as np
import pytest

from windlass.data.batches import TokenBatch
from windlass.data.examples import ExampleBatches, ExampleDataset
from windlass.data.read_ahead import ReadAhead

MICRO, COUNT, FIRST = 2, 3, 6
"""The second of two replicas, each with three micro-batches of two samples."""
IN_ORDER = [(step, micro) for step in (1, 2, 3) for micro in range(COUNT)]
ANYHOW = [(1, 0), (1, 2), (3, 1), (3, 1), (1, 0), (2, 2), (3, 0)]


class Noted(ExampleBatches):
    """Batches that note what is read of them."""

    asked: list[tuple[int, int]]

    def samples(
        self, step: int, first: int = 0, count: int | None = None
    ) -> tuple[TokenBatch, TokenBatch]:
        self.asked.append((step, first))
        return super().samples(step, first, count)


def noted() -> Noted:
    rows = np.arange(40 * 5, dtype=np.int64).reshape(40, 5)
    examples = ExampleDataset(inputs=rows, targets=rows + 1, held_out=4)
    made = Noted(examples, batch=12, seed=1)
    made.__dict__["asked"] = []
    return made


@pytest.mark.parametrize("order", [IN_ORDER, ANYHOW], ids=["in order", "anyhow"])
def test_what_is_read_ahead_is_what_is_read_at_once(order: Sequence[tuple[int, int]]):
    batches = noted()
    reader = ReadAhead(batches, first=FIRST, micro=MICRO, count=COUNT)
    read = [reader.read(*place) for place in order]
    reader.close()
    for (step, micro), examples in zip(order, read, strict=True):
        for got, expected in zip(
            examples, batches.samples(step, FIRST + micro * MICRO, MICRO), strict=True
        ):
            assert np.array_equal(got, expected)


def test_in_order_each_micro_batch_is_read_once_before_it_is_asked_for():
    batches = noted()
    reader = ReadAhead(batches, first=FIRST, micro=MICRO, count=COUNT)
    for place in IN_ORDER:
        reader.read(*place)
    reader.close()
    places = [(step, FIRST + micro * MICRO) for step, micro in IN_ORDER]
    assert batches.asked in (places, [*places, (4, FIRST)])
