"""Prediction: what follows from its numbers."""

from hypothesis import given, strategies as st

from windlass.schema.prediction import Prediction, TierPeak


def prediction(*peaks: TierPeak) -> Prediction:
    return Prediction(
        plan="p", machine="m", step_seconds=2, low_seconds=1.5, high_seconds=3, by_term={},
        by_kind={}, peaks=peaks, tokens_per_step=1000, model_flop=4e12, peak_flop_rate=1e13,
    )  # fmt: skip


@given(sizes=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3))
def test_a_plan_fits_if_no_tier_overflows(sizes: list[tuple[int, int]]):
    peaks = [TierPeak(tier="device", capacity_bytes=c, peak_bytes=p, by_class={}) for c, p in sizes]
    assert prediction(*peaks).fits == all(p <= c for c, p in sizes)
    assert [peak.over_bytes for peak in peaks] == [max(p - c, 0) for c, p in sizes]


def test_rates_follow_from_the_time_of_a_step():
    assert prediction().tokens_per_second == 500
    assert prediction().mfu == 0.2
