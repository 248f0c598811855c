"""Prediction: what follows from its numbers."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from windlass.errors import InputErrors
from windlass.schema.prediction import DeviceTimeline, Prediction, TierPeak, Timeline


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


@pytest.mark.parametrize("name", ["layers", "micro_batches", "starts", "ends", "memory_bytes"])
def test_a_timeline_whose_lists_differ_in_length_is_refused_by_name(tmp_path: Path, name: str):
    whole = DeviceTimeline(
        device=0, kinds=("forward", "backward"), layers=(0, 0), micro_batches=(0, 0),
        starts=(0, 1), ends=(1, 2), memory_bytes=(5, 6),
    )  # fmt: skip
    content = json.loads(Timeline(predicted=True, devices=(whole,)).to_json())
    del content["devices"][0][name][1:]
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(InputErrors, match=f"`{name}` has 1 entries and `kinds` 2; each has one"):
        Timeline.load(tmp_path / "t.json")


def test_the_chance_to_run_out_follows_from_the_interval_of_the_peak():
    peak = TierPeak(tier="device", capacity_bytes=0, peak_bytes=10**9, by_class={}, error=0.1)
    assert peak.overrun_chance(peak.peak_bytes) == pytest.approx(0.5)
    assert peak.overrun_chance(peak.high_bytes) == pytest.approx(0.1, rel=1e-3)
    exact = peak.model_copy(update={"error": 0.0})
    assert exact.overrun_chance(10**9) == 0
    assert exact.overrun_chance(10**9 - 1) == 1
