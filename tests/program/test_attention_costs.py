"""Cost of plain attention, from that of fused attention."""

import pytest

from factories import catalog_graph
from windlass.program.attention_costs import AttentionSizes, tile_shares, with_attention
from windlass.schema.attention_tiling import attention_tiles


@pytest.mark.parametrize(
    ("sequence", "share", "largest"),
    # One tile; two of 128; four; four of 256; a short last one.
    [(128, 1, 1), (256, 0.75, 0.5), (512, 0.625, 0.25), (1024, 0.625, 0.25),
     (320, (128 * 128 + 128 * 256 + 64 * 320) / 320**2, 128 * 256 / 320**2)],
)  # fmt: skip
def test_tiles_skip_keys_that_no_query_of_theirs_sees(sequence: int, share: float, largest: float):
    assert tile_shares(sequence, None, 0) == (share, largest)


def test_without_a_mask_nothing_is_skipped():
    assert tile_shares(512, None, None) == (1, 1)


@pytest.mark.parametrize(("earlier", "later"), [(64, 0), (64, 64), (300, 0), (2000, 2000)])
def test_tiles_hold_every_pair_of_tokens_that_see_each_other(earlier: int, later: int):
    tiles = attention_tiles(700, earlier, later)
    pairs = {(q, k) for (first, end), (begin, seen) in tiles
             for q in range(first, end) for k in range(begin, seen)}  # fmt: skip
    visible = {(q, k) for q in range(700) for k in range(700) if -earlier <= k - q <= later}
    assert visible <= pairs
    assert len(pairs) == round(tile_shares(700, earlier, later)[0] * 700**2)


def test_a_tile_is_as_long_as_its_window():
    first, others = 512 * 512, 7 * 512 * (512 + 511)
    assert tile_shares(4096, 511, 0) == ((first + others) / 4096**2, 512 * 1023 / 4096**2)
    assert len(attention_tiles(2048, 64, 64)) == 8  # 256 queries are the fewest


def test_heads_and_widths_follow_from_the_operation_itself():
    block = catalog_graph("llama-tiny").kinds["block"]
    (op,) = (op for op in block.costs[0].forward if op.kind == "attention")
    assert AttentionSizes.of(op, 4) == (6, 192, 64)


def test_only_layers_whose_attention_a_plan_chooses_change():
    graph = catalog_graph("gpt-tiny")
    head, block = graph.kinds["head"], graph.kinds["block"]
    for kind, changes in ((head, False), (block, True)):
        cost = kind.costs[0]
        other = with_attention(cost, kind, "math", 256, selective=False)
        assert (other != cost) is changes
    assert with_attention(cost, block, None, 256, selective=False) is cost


def test_another_fused_kernel_takes_the_same_memory():
    block = catalog_graph("gpt-tiny").kinds["block"]
    cost = block.costs[0]
    other = with_attention(cost, block, "cudnn", 256, selective=False)
    assert [op.live_bytes for op in other.backward] == [op.live_bytes for op in cost.backward]
    assert {op.attention for op in other.forward if op.kind == "attention"} == {"cudnn"}


def test_selective_recompute_keeps_no_probabilities_and_repeats_attention():
    block = catalog_graph("gpt-tiny").kinds["block"]
    kept = block.selective_costs[0]
    plain = with_attention(kept, block, "math", 256, selective=True)
    assert plain.saved_bytes.bss == 0
    assert plain.saved_bytes.at(1, 256) < kept.saved_bytes.at(1, 256)
    assert sum(op.kind == "attention" for op in plain.backward) == 2
