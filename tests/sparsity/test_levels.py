"""Which levels are legal, how a distribution spreads them, and what is refused."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from windlass.errors import InputErrors, ModelError
from windlass.schema import SparsityRequest
from windlass.sparsity.levels import WeightPart, kept_counts, kept_share

ROLES = ("query", "key", "value", "projection")


def gpt(width: int, *, ffn: int | None = None, layers: int = 12) -> dict[WeightPart, int]:
    """The parts of a GPT's weights."""
    parts = dict.fromkeys((WeightPart(role, width, width) for role in ROLES), layers)
    inner = 4 * width if ffn is None else ffn
    return parts | {
        WeightPart("up", inner, width): layers,
        WeightPart("down", width, inner): layers,
    }


def test_a_uniform_level_keeps_the_same_share_of_every_part():
    counts = kept_counts(SparsityRequest(level=0.875), gpt(1024))
    assert {part.role: kept for part, kept in counts.items()} == {
        **dict.fromkeys(ROLES, 2), "up": 2, "down": 8,
    }  # fmt: skip


def test_erdos_renyi_keeps_more_of_small_weights_and_the_asked_share_of_all():
    request = SparsityRequest(level=0.875, distribution="erdos-renyi", block=16)
    parts = gpt(1024)
    counts = kept_counts(request, parts)
    density = {part.role: 16 * counts[part] / part.inputs for part in parts}
    assert density["query"] == density["projection"] > density["up"] == density["down"]
    assert kept_share(request, parts) == pytest.approx(0.125, rel=0.025)


@given(level=st.floats(0.1, 0.95), width=st.sampled_from([256, 768, 1024, 1280]))
@settings(max_examples=60)
def test_what_is_refused_names_a_level_that_is_legal(level: float, width: int):
    request = SparsityRequest(level=level)
    try:
        kept_counts(request, gpt(width))
    except ModelError as error:
        nearest = float(str(error).partition("set `sparsity.level` = ")[2].partition(",")[0])
        kept_counts(SparsityRequest(level=nearest), gpt(width))


def test_roles_have_levels_of_their_own_and_zero_keeps_them_dense():
    request = SparsityRequest(level=0.75, roles={"query": 0.5, "up": 0})
    counts = kept_counts(request, gpt(1024))
    kept = {part.role: count / (part.inputs // 64) for part, count in counts.items()}
    assert kept == {
        "query": 0.5, "key": 0.25, "value": 0.25, "projection": 0.25, "up": 1, "down": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "parts", "message"),
    [
        (
            SparsityRequest(), gpt(768),
            (r"`sparsity.level` = 0.875 means 1.5 of 12 blocks a row in `query` \(768 x 768, "
            r"blocks of 64\), fewer than 2; set `sparsity.level` = 0.8333, the nearest "
            r"legal level, or set `sparsity.block` = 32"),
        ),
        (
            SparsityRequest(level=0.8), gpt(768),
            ("means 2.4 of 12 blocks a row .* no number that makes equal rows and columns; set "
            "`sparsity.level` = 0.8333"),
        ),
        (
            SparsityRequest(level=0.75, roles={"down": 0.99}), gpt(768),
            ("`sparsity.roles.down` = 0.99 means 0.48 of 48 blocks a row .* fewer than 2; set "
            "`sparsity.roles.down` = 0.9167"),
        ),
        (
            SparsityRequest(block=128, level=0.5), gpt(192),
            r"blocks of 128 x 128 do not divide `query` \(192 x 192\); set `sparsity.block` = 64",
        ),
        (
            SparsityRequest(pattern="2:4"), {WeightPart("up", 8, 6): 1},
            "keeps 2 of every 4 inputs, which do not divide the 6 of `up`",
        ),
        (
            SparsityRequest(roles={"query": 0.5}, level=0.75), {WeightPart("*.fc", 512, 512): 1},
            "`sparsity.roles.query` names no weight of this model; leave it out",
        ),
        (SparsityRequest(), gpt(64), "fewer than 2; choose a wider model"),
        (
            SparsityRequest(pattern="block-diagonal", level=0.6), gpt(768),
            "set `sparsity.level` = 0.6667, the nearest legal level",
        ),
    ],
)  # fmt: skip
def test_what_no_mask_can_have_is_refused_with_the_nearest_level_or_block(
    request_: SparsityRequest, parts: dict[WeightPart, int], message: str
):
    with pytest.raises((ModelError, InputErrors), match=message):
        kept_counts(request_, parts)
