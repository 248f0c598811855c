"""Micro-batch and sequence as whole numbers so large that sums and products stay readable.

A size of a transformer is a polynomial of micro-batch B and sequence S whose coefficients are small
whole numbers. With S = 2^96 and B = 2^288 these are the digits of the number in base 2^96, so that
plain integers compute with polynomials (Kronecker substitution).
"""

from windlass.schema import Polynomial

_DIGIT_BITS = 96
_MASK = (1 << _DIGIT_BITS) - 1

SEQUENCE = 1 << _DIGIT_BITS
"""The symbol S."""
MICRO_BATCH = SEQUENCE**3
"""The symbol B."""


def polynomial(number: int, rows: int) -> Polynomial:
    """The polynomial that a number stands for.

    Args:
        number: computed from `MICRO_BATCH` and `SEQUENCE`.
        rows: the number of tokens that `SEQUENCE` stood for was S / rows.
    """
    digits = [number >> place * _DIGIT_BITS & _MASK for place in range(6)]
    return Polynomial(
        *(digit / rows**power for digit, power in zip(digits, (0, 1, 2, 0, 1, 2), strict=True))
    )
