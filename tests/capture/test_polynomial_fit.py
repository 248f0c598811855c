"""Polynomials are found exactly."""

from hypothesis import given, strategies as st

from windlass.capture.trace import FIT_MICRO_BATCHES, fit_polynomial, sum_polynomials
from windlass.schema.graph import Polynomial

WHOLE = st.integers(-(2**20), 2**20)
quantities = st.builds(Polynomial, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)


@given(quantities, st.lists(st.integers(2, 64), min_size=3, max_size=3, unique=True))
def test_any_polynomial_is_found_from_six_points(quantity: Polynomial, sequences: list[int]):
    values = {(b, s): int(quantity.at(b, s)) for b in FIT_MICRO_BATCHES for s in sequences}

    assert fit_polynomial(values, sequences) == quantity


@given(st.lists(quantities, max_size=5), st.integers(1, 99), st.integers(1, 999))
def test_the_total_is_the_total_at_every_size(parts: list[Polynomial], micro: int, sequence: int):
    assert sum_polynomials(parts).at(micro, sequence) == sum(q.at(micro, sequence) for q in parts)
