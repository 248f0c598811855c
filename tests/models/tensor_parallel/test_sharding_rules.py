"""Sharding rules, and the parameter shards that follow from them."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.models.tensor_parallel.sharding_rules import (
    LayerSharding,
    ShardingRule,
    parse_sharding_rule,
)

SMALL = {"layers": 1, "width": 48, "heads": 12, "sequence": 12, "ffn": 96}


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    unit=st.integers(1, 3),
    degree=st.integers(1, 5),
    row=st.booleans(),
)
def test_shards_of_all_ranks_tile_a_linear_exactly(
    parts: list[int], unit: int, degree: int, row: bool
):
    wide = sum(parts) * unit * degree
    layer = nn.Linear(wide, 3) if row else nn.Linear(3, wide)
    rule = ShardingRule(style="row" if row else "column", parts=tuple(parts), unit=unit)
    assert rule.divisibility_error(wide, degree) is None
    assert_tiled(layer, LayerSharding(rules={"": rule}, is_first=False), degree)


@given(rows=st.integers(1, 40), degree=st.integers(1, 7))
def test_shards_of_all_ranks_tile_an_uneven_vocabulary_exactly(rows: int, degree: int):
    rule = ShardingRule(style="vocabulary")
    sharding = LayerSharding(rules={"": rule}, is_first=False)
    assert_tiled(nn.Embedding(rows, 2), sharding, degree)
    sizes = [
        param_shards(nn.Embedding(rows, 2), sharding, tp_rank)["weight"].shape[0]
        for tp_rank in tp_ranks(degree)
    ]
    assert (rule.divisibility_error(rows, degree) is None) == (min(sizes) > 0)
    assert max(sizes) == sizes[0] == -(-rows // degree)


@pytest.mark.parametrize("family", ["gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "llama-tiny"])
@pytest.mark.parametrize(("degree", "columns"), [(2, 1), (3, 1), (4, 1), (4, 2), (6, 3), (6, 2)])
def test_shards_of_every_family_tile_it_and_are_what_the_sharded_layer_holds(
    family: str, degree: int, columns: int
):
    grouped = {"kv_heads": 12} if family == "llama-tiny" else {}
    stack = build_layer_stack(family, {**SMALL, "vocabulary": 50, **grouped}, device="cpu", seed=0)
    for index, layer in enumerate(stack.layers):
        sharding = layer_sharding(stack, index)
        assert_tiled(layer, sharding, degree, columns)
        for tp_rank in tp_ranks(degree, columns):
            sharded = shard_layer(layer, sharding, tp_rank, last=index == len(stack.layers) - 1)
            shapes = {name: tuple(p.shape) for name, p in sharded.named_parameters()}
            assert shapes == {
                name: p.shape for name, p in param_shards(layer, sharding, tp_rank).items()
            }


def assert_tiled(layer: nn.Module, sharding: LayerSharding, degree: int, columns: int = 1) -> None:
    for name, parameter in layer.named_parameters():
        full = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
        back, times = torch.zeros_like(full), torch.zeros_like(full)
        for tp_rank in tp_ranks(degree, columns):
            shard = param_shards(layer, sharding, tp_rank)[name]
            local = shard.extract(full)
            assert tuple(local.shape) == shard.shape
            shard.write_into(back, local)
            once = torch.zeros_like(full)
            shard.write_into(once, torch.ones(shard.shape))
            times += once
        assert torch.equal(back, full)
        copies = {None: 1, "all": degree, "tokens": degree // columns, "features": columns}
        assert (times == copies[shard.replicated_over]).all()


def tp_ranks(degree: int, columns: int = 1) -> list[TensorParallelRank]:
    return [
        TensorParallelRank(degree=degree, index=index, columns=columns) for index in range(degree)
    ]


def test_heads_that_divide_only_by_the_rows_of_a_grid_are_replicated_within_a_row():
    """GPT-3 175B has 96 heads, which 8x8 ranks cannot share equally; 8 rows have 12 each."""
    stack = build_layer_stack("gpt-tiny", {**SMALL, "heads": 6}, device="cpu", seed=0)
    layer, sharding = stack.layers[1], layer_sharding(stack, 1)
    assert_tiled(layer, sharding, 4, 2)
    shards = param_shards(layer, sharding, TensorParallelRank(degree=4, columns=2, index=2))
    bias = shards["attention.input.bias"]
    assert (bias.shape, bias.replicated_over) == ((3 * 24,), "features")
    assert bias.ranges == (((24, 48), (72, 96), (120, 144)),)
    assert shards["attention.input.weight"].shape == (3 * 24, 24)
    assert shards["hidden.input.bias"].shape == (96 // 4,)


def test_a_grid_replicates_a_norm_of_heads_and_shards_a_norm_of_tokens():
    """Like the norms of queries and keys in Qwen 3, between a region's column and row."""
    layer = nn.ModuleDict(
        {"norm": nn.RMSNorm(8), "wide": nn.Linear(8, 16), "heads": nn.RMSNorm(4),
         "back": nn.Linear(16, 8)}
    )  # fmt: skip
    rules = {
        "": ShardingRule(style="region"),
        "wide": ShardingRule(style="column", unit=4),
        "back": ShardingRule(style="row"),
    }
    shards = param_shards(
        layer,
        LayerSharding(rules=rules, is_first=False),
        TensorParallelRank(degree=4, columns=2, index=1),
    )
    assert (shards["heads.weight"].shape, shards["heads.weight"].replicated_over) == ((4,), "all")
    assert (shards["norm.weight"].shape, shards["norm.weight"].replicated_over) == ((4,), "tokens")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("row", ShardingRule(style="row")),
        ("column in 3", ShardingRule(style="column", parts=(1, 1, 1))),
        ("column in 4:1:1 by 64", ShardingRule(style="column", parts=(4, 1, 1), unit=64)),
    ],
)
def test_a_rule_is_parsed(text: str, rule: ShardingRule):
    assert parse_sharding_rule("*.attention", text) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colum", "did you mean `column`"),
        ("column in 0", "count from 1"),
        ("column in 1000000000", "must be one of"),
        (f"column by {'9' * 5000}", "must be one of"),
        ("region in 3", "only a column or row"),
        ("column by", "must be one of"),
    ],
)
def test_text_that_is_not_a_rule_is_refused(text: str, message: str):
    with pytest.raises(ModelError, match=rf"rule `\*\.attention` = `{text}`.*{message}"):
        parse_sharding_rule("*.attention", text)
