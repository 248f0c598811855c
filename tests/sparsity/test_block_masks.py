"""Laws of masks: equal counts in every row, column and column group, at random otherwise."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from windlass.sparsity.block_sparse_linear import draw_block_mask
from windlass.sparsity.levels import BlockPart, column_groups


@st.composite
def legal_masks(draw: st.DrawFn, *, diagonal: bool = False) -> tuple[list[BlockPart], int, int]:
    """Parts that a mask can balance, block columns, and a seed."""
    columns = draw(st.integers(2, 24))
    parts: list[BlockPart] = []
    for rows in draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)):
        legal = [
            kept
            for kept in range(1, columns + 1)
            if rows * kept % columns == 0
            and (not diagonal or (columns % kept == 0 and rows % (columns // kept) == 0))
        ]
        parts.append(BlockPart(rows, draw(st.sampled_from(legal))))
    return parts, columns, draw(st.integers(0, 2**32))


def grid(parts: list[BlockPart], columns: int, seed: int, *, diagonal: bool = False) -> Tensor:
    """The mask as `Bool[rows columns]`."""
    torch.manual_seed(seed)
    blocks = draw_block_mask(parts, columns, diagonal=diagonal)
    kept = torch.zeros(sum(part.rows for part in parts), columns, dtype=torch.bool)
    kept[blocks[:, 0].long(), blocks[:, 1].long()] = True
    assert int(kept.sum()) == len(blocks)  # none occurs twice
    return kept


@given(mask=legal_masks(), diagonal=st.just(value=False))
@settings(max_examples=80)
def test_each_row_column_and_column_group_of_a_part_keeps_as_many_blocks_as_any_other(
    mask: tuple[list[BlockPart], int, int], diagonal: bool
):
    assert_balanced(*mask, diagonal=diagonal)


@given(mask=legal_masks(diagonal=True))
@settings(max_examples=40)
def test_a_diagonal_mask_keeps_the_same_law(mask: tuple[list[BlockPart], int, int]):
    assert_balanced(*mask, diagonal=True)


def assert_balanced(parts: list[BlockPart], columns: int, seed: int, *, diagonal: bool) -> None:
    kept = grid(parts, columns, seed, diagonal=diagonal)
    first = 0
    for part in parts:
        of_part = kept[first : first + part.rows]
        assert (of_part.sum(1) == part.kept).all()
        assert (of_part.sum(0) == part.rows * part.kept // columns).all()
        groups = column_groups(columns, part.kept)
        of_groups = of_part.unflatten(1, (groups, -1)).sum(-1)
        assert (of_groups == part.kept // groups).all()
        first += part.rows


def test_the_kept_blocks_of_a_diagonal_mask_are_dense_tiles():
    kept = grid([BlockPart(12, 3)], 12, 0, diagonal=True)
    tiles = kept.unflatten(0, (4, 3))
    assert (tiles == tiles[:, :1]).all()  # rows of one tile share their columns
    assert (tiles[:, 0].sum(0) == 1).all()  # each column belongs to one tile


@given(
    columns=st.integers(1, 4096), kept=st.integers(1, 4096), degree=st.sampled_from([1, 2, 4, 8])
)
def test_column_groups_are_the_largest_degree_that_divides_columns_and_kept_blocks(
    columns: int, kept: int, degree: int
):
    groups = column_groups(columns, kept)
    divides = columns % degree == 0 and kept % degree == 0
    assert (groups % degree == 0) == divides


def test_a_mask_depends_on_the_seed_and_is_sorted_by_row_then_column():
    torch.manual_seed(1)
    first = draw_block_mask([BlockPart(16, 4)], 16, diagonal=False)
    torch.manual_seed(1)
    again = draw_block_mask([BlockPart(16, 4)], 16, diagonal=False)
    other = draw_block_mask([BlockPart(16, 4)], 16, diagonal=False)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    order = first[:, 0].long() * 16 + first[:, 1]
    assert torch.equal(order, order.sort().values)
