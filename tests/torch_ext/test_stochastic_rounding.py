"""Stochastic rounding of weights to bfloat16."""

import torch
from hypothesis import given, strategies as st

from windlass.torch_ext.quantized_moments import PART_ELEMENTS, StochasticRounding

CPU = torch.device("cpu")
STEPS = 4000
MEAN = 4 / (2 * STEPS**0.5)
"""Four standard errors of a mean of that many draws of 0 or 1, as a share of the distance between
two neighbours in bfloat16."""


def rounded(values: torch.Tensor, *, step: int = 1, first: int = 0, seed: int = 0) -> torch.Tensor:
    into = torch.empty(len(values), dtype=torch.bfloat16)
    StochasticRounding(CPU, seed).round(values.clone(), into, step=step, weight="w", first=first)
    return into


def test_the_expected_value_of_the_rounding_is_the_value():
    values = torch.tensor([1.0, 1.001, -1.0049, 3.1, 1e-3, -7e5, 0.0])
    rounding, total = StochasticRounding(CPU, 0), torch.zeros(len(values), dtype=torch.float64)
    into = torch.empty(len(values), dtype=torch.bfloat16)
    for step in range(STEPS):
        rounding.round(values.clone(), into, step=step, weight="w", first=0)
        total += into
    # Neighbours are 2^-7 of the power of two below a value apart.
    distance = torch.exp2(values.abs().clamp(min=1e-30).log2().floor() - 7)
    assert ((total / STEPS - values).abs() <= MEAN * distance).all()


def test_a_value_becomes_one_of_its_two_neighbours_and_is_kept_if_it_is_one():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    result = rounded(values)
    down = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    up = (down.view(torch.int32) + 2**16).view(torch.float32)
    assert torch.where(result.float() == down, down, up).equal(result.float())
    assert torch.equal(rounded(result.float(), step=2), result)


@given(cut=st.integers(1, 2 * PART_ELEMENTS))
def test_a_piece_is_rounded_as_within_the_whole(cut: int):
    values = torch.linspace(-1, 1, 2 * PART_ELEMENTS + 77)
    pieces = rounded(values[:cut]), rounded(values[cut:], first=cut)
    assert torch.equal(torch.cat(pieces), rounded(values))


def test_seeds_and_steps_round_differently():
    values = torch.full((64,), 1.003)
    assert not torch.equal(rounded(values), rounded(values, step=2))
    assert not torch.equal(rounded(values), rounded(values, seed=1))
