"""Student's t distribution and the functions of its variances, without scipy."""

import math

_FRACTION_TERMS, _PRECISION, _TINY = 300, 1e-15, 1e-300
_BISECTIONS = 200
_ASYMPTOTIC_FROM = 10.0
"""Arguments from which the asymptotic series of `digamma` and `trigamma` are exact to 1e-12."""


def t_survival(t: float, freedom: float) -> float:
    """Probability that a Student-t variable exceeds `t`: `I_x(v/2, 1/2) / 2`, `x = v / (v + t^2)`.

    Source: Abramowitz & Stegun 1964, 26.7.1.

    Args:
        t: any number.
        freedom: degrees of freedom v, above 0; infinity means the normal distribution.
    """
    if math.isinf(freedom):
        return math.erfc(t / math.sqrt(2)) / 2
    tail = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return tail if t > 0 else 1 - tail


def t_quantile(survival: float, freedom: float) -> float:
    """The t that a Student-t variable exceeds with probability `survival`, by bisection."""
    if survival > 0.5:
        return -t_quantile(1 - survival, freedom)
    low, high = 0.0, 1.0
    while t_survival(high, freedom) > survival:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_survival(middle, freedom) > survival else (low, middle)
    return (low + high) / 2


def digamma(x: float) -> float:
    """The derivative of log gamma at `x` above 0. Source: Abramowitz & Stegun 1964, 6.3.18."""
    shift = 0.0
    while x < _ASYMPTOTIC_FROM:
        shift, x = shift - 1 / x, x + 1
    square = 1 / (x * x)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return shift + math.log(x) - 1 / (2 * x) - series


def trigamma(x: float) -> float:
    """The second derivative of log gamma at `x` above 0. Source: the same, 6.4.12."""
    shift = 0.0
    while x < _ASYMPTOTIC_FROM:
        shift, x = shift + 1 / (x * x), x + 1
    square = 1 / (x * x)
    series = square * (1 / 6 - square * (1 / 30 - square * (1 / 42 - square / 30)))
    return shift + 1 / x + square / 2 + series / x


def inverse_trigamma(value: float) -> float:
    """The x at which `trigamma` is `value`, above 0; by bisection of its logarithm."""
    low, high = -30.0, 30.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if trigamma(math.exp(middle)) > value:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz's method).

    Source: Abramowitz & Stegun 1964, 26.5.8; Press et al. 2007, Numerical Recipes, 6.4.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    factor = math.exp(logarithm + a * math.log(x) + b * math.log1p(-x)) / a
    value, c, d = 1.0, 1 / _TINY, 1.0
    for term in range(1, _FRACTION_TERMS):
        m = term // 2
        if term % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or _TINY)
        c = 1 + numerator / c or _TINY
        value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return factor * value
