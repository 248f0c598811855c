"""Rules of cutting, and the pieces that follow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from windlass.errors import ModelError
from windlass.models.build import build_chain
from windlass.models.chain import cuts_of
from windlass.models.cuts import Cut, LayerCuts, read_cut
from windlass.models.exchange import Place
from windlass.models.pieces import pieces
from windlass.models.slices import sliced

SMALL = {"layers": 1, "width": 48, "heads": 12, "sequence": 12, "hidden": 96}


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
    cut = Cut(way="row" if row else "column", parts=tuple(parts), unit=unit)
    assert cut.fault(wide, degree) is None
    tiled(layer, LayerCuts(ways={"": cut}, first=False), degree)


@given(rows=st.integers(1, 40), degree=st.integers(1, 7))
def test_pieces_of_all_slices_tile_an_uneven_vocabulary_exactly(rows: int, degree: int):
    cut = Cut(way="vocabulary")
    cuts = LayerCuts(ways={"": cut}, first=False)
    tiled(nn.Embedding(rows, 2), cuts, degree)
    shares = [pieces(nn.Embedding(rows, 2), cuts, at)["weight"].shape[0] for at in places(degree)]
    assert (cut.fault(rows, degree) is None) == (min(shares) > 0)
    assert max(shares) == shares[0] == -(-rows // degree)


@pytest.mark.parametrize("family", ["gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "llama-tiny"])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_pieces_of_every_family_tile_it_and_are_what_its_twin_holds(family: str, degree: int):
    grouped = {"key_heads": 12} if family == "llama-tiny" else {}
    chain = build_chain(family, {**SMALL, "vocabulary": 50, **grouped}, device="cpu", seed=0)
    for index, layer in enumerate(chain.layers):
        cuts = cuts_of(chain, index)
        tiled(layer, cuts, degree)
        for place in places(degree):
            twin = sliced(layer, cuts, place, last=index == len(chain.layers) - 1)
            held = {name: tuple(p.shape) for name, p in twin.named_parameters()}
            assert held == {name: p.shape for name, p in pieces(layer, cuts, place).items()}


def tiled(layer: nn.Module, cuts: LayerCuts, degree: int) -> None:
    for name, parameter in layer.named_parameters():
        full = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
        back, times = torch.zeros_like(full), torch.zeros_like(full)
        for place in places(degree):
            piece = pieces(layer, cuts, place)[name]
            local = piece.of(full)
            assert tuple(local.shape) == piece.shape
            piece.into(back, local)
            once = torch.zeros_like(full)
            piece.into(once, torch.ones(piece.shape))
            times += once
        assert torch.equal(back, full)
        assert (times == (1 if piece.dim is not None else degree)).all()


def places(degree: int) -> list[Place]:
    return [Place(degree=degree, index=index) for index in range(degree)]


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("row", Cut(way="row")),
        ("column in 3", Cut(way="column", parts=(1, 1, 1))),
        ("column in 4:1:1 by 64", Cut(way="column", parts=(4, 1, 1), unit=64)),
    ],
)
def test_a_rule_is_read(text: str, cut: Cut):
    assert read_cut("*.attention", text) == cut


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
        read_cut("*.attention", text)
