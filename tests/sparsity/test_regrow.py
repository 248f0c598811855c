"""Which blocks an update of a mask drops and grows."""

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from windlass.sparsity.block_sparse_linear import BlockPart, draw_block_mask
from windlass.sparsity.regrow import BlockGrid, largest_blocks, mask_update, random_scores


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, BlockGrid]:
    """Kept blocks in any order, equally many in each part of a row, and their grid."""
    groups = draw(st.sampled_from([1, 2, 4]))
    span = draw(st.integers(1, 6))
    kept = draw(st.integers(1, span))
    grid = BlockGrid(draw(st.integers(1, 6)), groups * span, groups)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    order = torch.rand(grid.rows, groups, span, generator=generator).argsort(2).argsort(2)
    blocks = (order < kept).view(grid.rows, grid.columns).nonzero().to(torch.int32)
    return blocks[torch.randperm(len(blocks), generator=generator)], grid


def counts(blocks: Tensor, grid: BlockGrid) -> Tensor:
    """Kept blocks in each row and column group."""
    row, column = blocks.long().unbind(1)
    cells = row * grid.groups + column // (grid.columns // grid.groups)
    return torch.bincount(cells, minlength=grid.rows * grid.groups)


@given(weight=weights(), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_an_update_keeps_the_counts_of_every_row_and_group_and_no_block_twice(
    weight: tuple[Tensor, BlockGrid], share: float, seed: int
) -> None:
    blocks, grid = weight
    generator = torch.Generator().manual_seed(seed)
    norms = torch.rand(len(blocks), generator=generator).mul(4).round()  # many are equal
    scores = torch.rand(grid.rows, grid.columns, generator=generator).mul(4).round()

    update = mask_update(blocks, norms, scores, grid, share)

    after = blocks.clone()
    after[update.slots] = update.blocks
    assert torch.equal(counts(after, grid), counts(blocks, grid))
    assert len({tuple(pair) for pair in after.tolist()}) == len(blocks)
    before = {tuple(pair) for pair in blocks.tolist()}
    assert all(tuple(pair) not in before for pair in update.blocks.tolist())
    assert len(set(update.slots.tolist())) == len(update.slots) <= round(share * len(blocks))
    # A block follows one of its own row and group, so that no rank's part of the values changes.
    span = grid.columns // grid.groups
    divisor = torch.tensor([1, span])
    assert torch.equal(blocks[update.slots] // divisor, update.blocks // divisor)


def test_the_smallest_blocks_go_and_the_most_wanted_come() -> None:
    blocks = torch.tensor([[0, 0], [0, 1], [1, 2], [1, 3]], dtype=torch.int32)
    norms = torch.tensor([3.0, 1.0, 2.0, 4.0])
    scores = torch.tensor([[9.0, 9.0, 1.0, 2.0], [5.0, 6.0, 9.0, 9.0]])

    update = mask_update(blocks, norms, scores, BlockGrid(2, 4), 0.5)

    assert update.slots.tolist() == [1, 2]
    assert update.blocks.tolist() == [[0, 3], [1, 1]]


def test_a_row_without_enough_absent_blocks_keeps_its_largest() -> None:
    blocks = torch.tensor([[0, 0], [0, 1], [0, 2]], dtype=torch.int32)
    update = mask_update(
        blocks, torch.tensor([1.0, 2.0, 3.0]), torch.ones(1, 4), BlockGrid(1, 4), 1.0
    )
    assert update.slots.tolist() == [0]
    assert update.blocks.tolist() == [[0, 3]]


def test_random_scores_depend_on_seed_name_and_step_alone() -> None:
    grid = BlockGrid(3, 5)
    first = random_scores(grid, seed=1, name="block0.up.values", step=4)
    torch.rand(7)
    assert torch.equal(first, random_scores(grid, seed=1, name="block0.up.values", step=4))
    others = [(2, "block0.up.values", 4), (1, "block1.up.values", 4), (1, "block0.up.values", 5)]
    for seed, name, step in others:
        assert not torch.equal(first, random_scores(grid, seed=seed, name=name, step=step))


@given(seed=st.integers(0, 10**6), groups=st.sampled_from([1, 2, 4]), kept=st.integers(1, 3))
def test_the_largest_blocks_of_each_row_and_group_are_kept(
    seed: int, groups: int, kept: int
) -> None:
    norms = torch.rand(4, 12, generator=torch.Generator().manual_seed(seed))

    blocks = largest_blocks(norms, kept * groups, groups)

    expected = [
        [row, group * (12 // groups) + column]
        for row, parts in enumerate(norms.view(4, groups, -1))
        for group, part in enumerate(parts)
        for column in sorted(part.topk(kept).indices.tolist())
    ]
    assert blocks.tolist() == expected


def test_drawn_masks_are_updated_in_their_own_groups() -> None:
    torch.manual_seed(0)
    blocks = draw_block_mask([BlockPart(8, 4)], 16, diagonal=False)
    grid = BlockGrid(8, 16, 4)
    update = mask_update(blocks, torch.rand(len(blocks)), torch.rand(8, 16), grid, 0.3)
    assert len(update.slots) == round(0.3 * 32)
