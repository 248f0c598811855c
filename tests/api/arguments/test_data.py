"""Data that a caller passes: data sets and loaders of torch's, taken or named."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from windlass.errors import DataError
from windlass.jobs.arguments.data import with_data
from windlass.schema import Request

Pair = tuple[Tensor, Tensor]


class Fifty(Dataset[Pair]):
    """Answers any index, as a data set that draws its items does."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Pair:
        ids = torch.arange(index, index + 9) % 17
        return ids[:-1], ids[1:]


class Endless(IterableDataset[Pair]):
    def __iter__(self) -> Iterator[Pair]:
        number = 0
        while True:
            yield Fifty()[number]
            number += 1


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(("input_ids", "labels"), Fifty()[index], strict=True))


def taken(data: object, **settings: int) -> tuple[Request, list[Pair]]:
    request, items = with_data(Request(train=settings), data)  # type: ignore[arg-type]
    assert items is not None
    return request, [items for items, _ in zip(items, range(120), strict=False)]  # type: ignore[misc]


def test_a_map_style_data_set_is_as_long_as_it_says():
    request, pairs = taken(Fifty())
    assert len(pairs) == 50
    assert request.train.sequence == 8


@pytest.mark.parametrize("batch", [4, 7])
def test_batches_of_a_loader_are_taken_apart_and_their_size_is_the_batch(batch: int):
    request, pairs = taken(DataLoader(Fifty(), batch_size=batch))
    assert request.train.batch == batch
    expected = [Fifty()[index] for index in range(50)]
    assert all(torch.equal(a, b) for one, two in zip(pairs, expected, strict=True)
               for a, b in zip(one, two, strict=True))  # fmt: skip
    assert taken(DataLoader(Fifty(), batch_size=batch), batch=3)[0].train.batch == 3


def test_a_loader_without_end_is_read_as_far_as_it_is_needed():
    assert len(taken(DataLoader(Endless(), batch_size=4))[1]) == 120


def test_a_loader_of_token_ids_or_of_single_examples_is_taken_too():
    rows = TensorDataset(torch.arange(80).reshape(10, 8))
    assert len(taken(DataLoader(rows, batch_size=4))[1]) == 10
    assert len(taken(DataLoader(Fifty(), batch_size=None))[1]) == 50


def test_batches_that_are_not_taken_are_named():
    with pytest.raises(DataError, match="are of type `dict`, not of token ids"):
        taken(DataLoader(Named(), batch_size=4))
    batches = [(torch.zeros(4, 8, dtype=torch.long),) * 2] * 3
    with pytest.raises(DataError, match="looks like a batch of 4 pairs of token ids; pass each"):
        taken(batches)
