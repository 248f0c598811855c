import numpy as np
import pytest

from windlass.judge.change_points import change_points, stall_share


def steps(rng: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Step times whose logarithms are an autoregression with heavy tails, around 0.1 s."""
    draws = 0.03 * rng.standard_t(3, count)
    logs = np.zeros(count)
    for index in range(1, count):
        logs[index] = correlation * logs[index - 1] + draws[index]
    return 0.1 * np.exp(logs)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_clean_runs_have_no_change_also_if_their_steps_are_correlated(correlation: float):
    rng = np.random.default_rng(0)
    alarms = sum(bool(change_points(steps(rng, 400, correlation))) for _ in range(100))
    assert alarms <= 3


@pytest.mark.parametrize("planted", [100, 200, 300])
def test_a_planted_change_is_found_at_its_step(planted: int):
    values = steps(np.random.default_rng(planted), 400, 0.3)
    values[planted:] *= 1.25
    (change,) = change_points(values)
    assert abs(change.index - planted) <= 5
    assert change.magnitude == pytest.approx(0.25, abs=0.05)


def test_a_change_and_its_end_are_two_changes():
    values = steps(np.random.default_rng(3), 600, 0.3)
    values[200:400] *= 1.4
    up, down = change_points(values)
    assert up.magnitude > 0.3
    assert down.magnitude < -0.2


def test_a_change_below_three_percent_is_none():
    values = np.full(400, 0.1)
    values[200:] *= 1.02
    assert change_points(values) == ()


def test_stalls_are_no_change_and_are_counted():
    values = steps(np.random.default_rng(4), 400, 0.0)
    values[::25] *= 5
    assert change_points(values) == ()
    assert stall_share(values) == pytest.approx(0.04, abs=0.01)


@pytest.mark.parametrize(
    ("seed", "found"),
    [(0, []), (2, [14, 26]), (4, [26]), (5, [14]), (7, [14, 26]), (8, [26]), (10, [14, 26])],
)
def test_changes_are_those_that_apache_otava_0_8_finds_in_the_medians(seed: int, found: list[int]):
    rng = np.random.default_rng(seed)
    levels = np.repeat([1, 1 + 0.1 * (seed % 4), 1 + 0.05 * (seed % 3)], [14, 12, 14])
    medians = levels * np.exp(rng.normal(0, 0.01, 40))
    # Twenty steps around each median, so close that only the medians matter.
    values = np.repeat(medians, 20) * (1 + np.tile(np.linspace(-1e-3, 1e-3, 20), 40))
    assert [change.index / 20 for change in change_points(values)] == found
