"""Dropout masks from keys."""

from typing import Any

import pytest
import torch
from torch import nn

from windlass.models.tensor_parallel.parallel_modules import SampleShard
from windlass.models.tensor_parallel.shard_params import EqualShard
from windlass.runtime.keyed_dropout import (
    DropoutKeys,
    KeyedDropout,
    disabled_keys,
    key_buffers,
    layer_key,
    replace_dropout,
    sample_keys,
)

WIDTH, SAMPLES, RATE = 4096, 16, 0.25
DEVIATIONS = 5
"""A sound generator misses such an interval once in 1.7 million draws."""


def mask(
    *,
    seed: int = 1,
    step: int = 1,
    layer: str = "block0",
    first: int = 0,
    count: int = SAMPLES,
    position: int = 0,
    uses: int = 1,
) -> torch.Tensor:
    """`Bool[count WIDTH]`: what is kept at the last of some uses of one module."""
    dropout = KeyedDropout(RATE, position)
    keys = DropoutKeys(
        samples=sample_keys(seed, step, first, count),
        layer=layer_key(layer),
        active=torch.ones((), dtype=torch.int64),
    )
    for name, value in key_buffers(["x"], keys).items():
        setattr(dropout, name.removeprefix("x."), value)
    dropout.begin_forward()
    for _ in range(uses):
        kept = dropout(torch.ones(count, WIDTH))
    return kept != 0


def test_a_mask_does_not_depend_on_the_micro_batch_size():
    full = mask(count=8)
    parts = [mask(first=first, count=2) for first in range(0, 8, 2)]
    assert torch.equal(full, torch.cat(parts))


def test_a_mask_is_reproducible():
    assert torch.equal(mask(), mask())


def test_the_share_of_dropped_elements_is_the_rate():
    count = SAMPLES * WIDTH
    dropped = count - int(mask().sum())
    deviation = (count * RATE * (1 - RATE)) ** 0.5
    assert abs(dropped - count * RATE) < DEVIATIONS * deviation


def test_neighbouring_elements_are_dropped_independently():
    kept = mask().float() - (1 - RATE)
    for shift in (1, 2, 64, 1024):
        product = kept[:, shift:] * kept[:, :-shift]
        deviation = RATE * (1 - RATE) * product.numel() ** 0.5
        assert abs(float(product.sum())) < DEVIATIONS * deviation


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2}, {"step": 2}, {"layer": "block1"}, {"position": 1}, {"first": SAMPLES},
        {"uses": 2},
    ],
)  # fmt: skip
def test_masks_of_different_keys_are_independent(other: dict[str, Any]):
    both = (mask().float() - (1 - RATE)) * (mask(**other).float() - (1 - RATE))
    deviation = RATE * (1 - RATE) * both.numel() ** 0.5
    assert abs(float(both.sum())) < DEVIATIONS * deviation


def test_samples_of_one_batch_have_different_masks():
    assert len({tuple(row.tolist()) for row in mask()}) == SAMPLES


def test_kept_elements_are_scaled_so_that_the_mean_stays():
    dropout = KeyedDropout(RATE, 0)
    dropout.samples, dropout.active = sample_keys(0, 1, 0, 2), torch.ones((), dtype=torch.int64)
    assert dropout(torch.ones(2, WIDTH)).unique().tolist() == pytest.approx([0, 4 / 3])


def test_nothing_is_dropped_in_evaluation():
    x = torch.randn(3, 5, 7)
    dropout = KeyedDropout(RATE, 0)
    for name, value in key_buffers(["x"], disabled_keys(x)).items():
        setattr(dropout, name.removeprefix("x."), value)
    assert torch.equal(dropout(x), x)


def test_only_modules_with_a_positive_rate_are_keyed():
    layer = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), nn.Sequential(nn.Dropout(0.2)))
    assert replace_dropout(layer) == ("0", "2.0")
    assert isinstance(layer[1], nn.Identity)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_code_draws_the_same_mask():
    x = torch.ones(2, 64)
    dropout = KeyedDropout(RATE, 0)
    dropout.samples, dropout.active = sample_keys(0, 1, 0, 2), torch.ones((), dtype=torch.int64)
    eager = dropout(x)
    dropout.begin_forward()
    compiled = torch.compile(dropout, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x), eager)


@pytest.mark.parametrize("dim", [1, 2])
def test_masks_of_tensor_parallel_ranks_are_parts_of_the_full_mask(dim: int):
    x = torch.ones(2, 12, 20)
    full = dropped(x, None)
    shards = [EqualShard(index, 4) for index in range(4)]
    samples = [
        SampleShard(tokens=(each,)) if dim == 1 else SampleShard(features=each) for each in shards
    ]
    parts = list(map(dropped, x.chunk(4, dim=dim), samples))
    assert torch.equal(torch.cat(parts, dim=dim), full)
    assert 0 < int(full.count_nonzero()) < full.numel()


def test_masks_of_a_grid_are_the_full_mask_in_rows_and_columns():
    x = torch.ones(2, 12, 20)
    rows = [
        torch.cat(
            [
                dropped(
                    local, SampleShard(tokens=(EqualShard(row, 3),), features=EqualShard(column, 2))
                )
                for column, local in enumerate(tokens.chunk(2, dim=2))
            ],
            dim=2,
        )
        for row, tokens in enumerate(x.chunk(3, dim=1))
    ]
    assert torch.equal(torch.cat(rows, dim=1), dropped(x, None))


def dropped(x: torch.Tensor, part: SampleShard | None) -> torch.Tensor:
    dropout = KeyedDropout(RATE, 0, part)
    dropout.samples, dropout.layer = sample_keys(1, 1, 0, len(x)), layer_key("block0")
    dropout.active = torch.ones((), dtype=torch.int64)
    return dropout(x)
