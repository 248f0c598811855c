"""Rules of cutting, and the pieces that follow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, LayerSharding, parse_sharding_rule

SMALL = {"layers": 1, "width": 48, "heads": 12, "sequence": 12, "ffn": 96}


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    unit=st.integers(1, 3),
    degree=st.integers(1, 5),
    row=st.booleans(),
)
def test_pieces_of_all_slices_tile_a_linear_map_exactly(
    parts: list[int], unit: int, degree: int, row: bool
):
    wide = sum(parts) * unit * degree
    layer = nn.Linear(wide, 3) if row else nn.Linear(3, wide)
    cut = ShardingRule(style="row" if row else "column", parts=tuple(parts), unit=unit)
    assert cut.divisibility_error(wide, degree) is None
    tiled(layer, LayerSharding(rules={"": cut}, is_first=False), degree)


@given(rows=st.integers(1, 40), degree=st.integers(1, 7))
def test_pieces_of_all_slices_tile_an_uneven_vocabulary_exactly(rows: int, degree: int):
    cut = ShardingRule(style="vocabulary")
    cuts = LayerSharding(rules={"": cut}, is_first=False)
    tiled(nn.Embedding(rows, 2), cuts, degree)
    shares = [param_shards(nn.Embedding(rows, 2), cuts, at)["weight"].shape[0] for at in places(degree)]
    assert (cut.divisibility_error(rows, degree) is None) == (min(shares) > 0)
    assert max(shares) == shares[0] == -(-rows // degree)


@pytest.mark.parametrize("family", ["gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "llama-tiny"])
@pytest.mark.parametrize(("degree", "columns"), [(2, 1), (3, 1), (4, 1), (4, 2), (6, 3), (6, 2)])
def test_pieces_of_every_family_tile_it_and_are_what_its_twin_holds(
    family: str, degree: int, columns: int
):
    grouped = {"kv_heads": 12} if family == "llama-tiny" else {}
    chain = build_layer_stack(family, {**SMALL, "vocabulary": 50, **grouped}, device="cpu", seed=0)
    for index, layer in enumerate(chain.layers):
        cuts = layer_sharding(chain, index)
        tiled(layer, cuts, degree, columns)
        for place in places(degree, columns):
            twin = shard_layer(layer, cuts, place, last=index == len(chain.layers) - 1)
            held = {name: tuple(p.shape) for name, p in twin.named_parameters()}
            assert held == {name: p.shape for name, p in param_shards(layer, cuts, place).items()}


def tiled(layer: nn.Module, cuts: LayerSharding, degree: int, columns: int = 1) -> None:
    for name, parameter in layer.named_parameters():
        full = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
        back, times = torch.zeros_like(full), torch.zeros_like(full)
        for place in places(degree, columns):
            piece = param_shards(layer, cuts, place)[name]
            local = piece.extract(full)
            assert tuple(local.shape) == piece.shape
            piece.write_into(back, local)
            once = torch.zeros_like(full)
            piece.write_into(once, torch.ones(piece.shape))
            times += once
        assert torch.equal(back, full)
        alike = {None: 1, "all": degree, "tokens": degree // columns, "features": columns}
        assert (times == alike[piece.replicated_over]).all()


def places(degree: int, columns: int = 1) -> list[TensorParallelRank]:
    return [TensorParallelRank(degree=degree, index=index, columns=columns) for index in range(degree)]


def test_heads_that_do_not_divide_by_a_grid_are_those_of_its_rows_on_each_slice_of_a_row():
    """GPT-3 175B has 96 heads, which 8x8 slices cannot share equally; 8 rows have 12 each."""
    chain = build_layer_stack("gpt-tiny", {**SMALL, "heads": 6}, device="cpu", seed=0)
    layer, cuts = chain.layers[1], layer_sharding(chain, 1)
    tiled(layer, cuts, 4, 2)
    found = param_shards(layer, cuts, TensorParallelRank(degree=4, columns=2, index=2))
    bias = found["attention.input.bias"]
    assert (bias.shape, bias.replicated_over) == ((3 * 24,), "features")
    assert bias.ranges == (((24, 48), (72, 96), (120, 144)),)
    assert found["attention.input.weight"].shape == (3 * 24, 24)
    assert found["hidden.input.bias"].shape == (96 // 4,)


def test_a_norm_of_heads_is_whole_on_every_slice_of_a_grid_and_a_norm_of_tokens_is_not():
    """As the norms of queries and keys in Qwen 3, which stand between a region's column and row."""
    layer = nn.ModuleDict(
        {"norm": nn.RMSNorm(8), "wide": nn.Linear(8, 16), "heads": nn.RMSNorm(4),
         "back": nn.Linear(16, 8)}
    )  # fmt: skip
    ways = {"": ShardingRule(style="region"), "wide": ShardingRule(style="column", unit=4), "back": ShardingRule(style="row")}
    found = param_shards(layer, LayerSharding(rules=ways, is_first=False), TensorParallelRank(degree=4, columns=2, index=1))
    assert (found["heads.weight"].shape, found["heads.weight"].replicated_over) == ((4,), "all")
    assert (found["norm.weight"].shape, found["norm.weight"].replicated_over) == ((4,), "tokens")


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("row", ShardingRule(style="row")),
        ("column in 3", ShardingRule(style="column", parts=(1, 1, 1))),
        ("column in 4:1:1 by 64", ShardingRule(style="column", parts=(4, 1, 1), unit=64)),
    ],
)
def test_a_rule_is_read(text: str, cut: ShardingRule):
    assert parse_sharding_rule("*.attention", text) == cut


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colum", "did you mean `column`"),
        ("column in 0", "count from 1"),
        ("region in 3", "only a column or row"),
        ("column by", "must be one of"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(text: str, message: str):
    with pytest.raises(ModelError, match=rf"rule `\*\.attention` = `{text}`.*{message}"):
        parse_sharding_rule("*.attention", text)
