import math

import pytest

from windlass.judge.student_t import digamma, inverse_trigamma, t_quantile, t_survival, trigamma


@pytest.mark.parametrize(
    ("t", "freedom", "survival"),
    [
        (2.0, 5, 0.05096973941492915),
        (10.0, 2.5, 0.0022207478836537117),
        (-1.0, 7.3, 0.8253507717734427),
        (0.3, 1, 0.4072264209222577),
        (6.0, 300, 2.838219546179577e-09),
        (40.0, 4.0, 1.1670081613006339e-06),
        (3.0, math.inf, 0.0013498980316300933),
    ],
)
def test_survival_is_that_of_scipy_1_17(t: float, freedom: float, survival: float):
    assert t_survival(t, freedom) == pytest.approx(survival, rel=1e-9)


@pytest.mark.parametrize(
    ("survival", "freedom", "t"),
    [
        (0.025, 10, 2.2281388519862753),
        (0.00135, 4.2, 6.329471238606193),
        (5e-05, 3, 28.000130010948972),
        (0.975, 10, -2.2281388519862753),
    ],
)
def test_quantile_is_that_of_scipy_1_17(survival: float, freedom: float, t: float):
    assert t_quantile(survival, freedom) == pytest.approx(t, rel=1e-9)


def test_digamma_and_trigamma_are_those_of_scipy_1_17():
    assert digamma(0.46) == pytest.approx(-2.1754936054653444, rel=1e-10)
    assert trigamma(0.46) == pytest.approx(5.695017542114801, rel=1e-10)
    assert trigamma(17.2) == pytest.approx(0.05986236948160115, rel=1e-10)
    assert inverse_trigamma(trigamma(3.7)) == pytest.approx(3.7, rel=1e-9)
