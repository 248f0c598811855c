import math

import numpy as np
import pytest

from windlass.judge import DEFAULT_PRIOR, fit_noise_prior, moderated_t, robust_deviation
from windlass.judge.moderated_t import FALSE_ALARM_RATE

GROUPS = 3000


def simulated(runs: int, *, faulty: float = 0.0, shift: float = 0.0) -> float:
    """The share of new runs that are called slow, in simulated groups of earlier runs."""
    rng = np.random.default_rng(runs)
    deviations = np.exp(rng.normal(math.log(0.012), 0.35, GROUPS))[:, None]
    earlier = rng.standard_normal((GROUPS, runs)) * deviations
    earlier += 0.15 * (rng.random((GROUPS, runs)) < faulty)
    new = rng.standard_normal(GROUPS) * deviations[:, 0] + shift
    prior = fit_noise_prior(earlier)
    tests = [moderated_t(value, group, prior) for value, group in zip(new, earlier, strict=True)]
    return float(np.mean([test.p < FALSE_ALARM_RATE for test in tests]))


@pytest.mark.parametrize("runs", [3, 5, 10, 30])
def test_false_alarms_are_as_rare_as_three_deviations_of_a_normal_distribution(runs: int):
    # Four binomial deviations above the rate: 3000 * 0.00135 = 4, + 4 * 2.
    assert simulated(runs) * GROUPS <= 12


def test_a_tenth_more_is_found_beside_three_runs_in_nine_of_ten_groups():
    assert simulated(3, shift=0.10) >= 0.9


def test_a_history_with_broken_runs_still_finds_a_tenth_more():
    assert simulated(30, faulty=0.1, shift=0.10) >= 0.9


def test_the_prior_of_many_small_groups_is_what_they_were_drawn_with():
    rng = np.random.default_rng(0)
    freedom, deviation = 8.0, 0.02
    variances = deviation**2 * freedom / rng.chisquare(freedom, 20_000)
    groups = rng.standard_normal((20_000, 5)) * np.sqrt(variances)[:, None]
    prior = fit_noise_prior(groups)
    assert prior.deviation == pytest.approx(deviation, rel=0.03)
    assert prior.freedom == pytest.approx(freedom, rel=0.2)


def test_a_record_of_few_groups_takes_the_usual_prior():
    assert fit_noise_prior([[0.0, 0.1, 0.2]] * 4) == DEFAULT_PRIOR


def test_one_bad_old_run_moves_the_noise_floor_little():
    clean = np.log([1.00, 1.01, 0.99, 1.02, 0.98, 1.00, 1.01])
    spoiled = np.append(clean, np.log(3.0))
    assert robust_deviation(spoiled)[0] < 2 * robust_deviation(clean)[0]
    assert np.std(spoiled) > 20 * np.std(clean)
