"""Lanes keep order and time, merge what is too short to see, and share one time axis."""

import random
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from report.made_runs import timeline as made_timeline
from windlass.report.figures.timeline import (
    draw_timeline,
    merge_short_instructions,
    predicted_and_measured_timeline,
    time_shares,
)
from windlass.schema.prediction import DeviceTimeline, Timeline

KINDS = ("forward", "backward", "update")


def lane(seconds: list[float], gaps: list[float] | None = None) -> DeviceTimeline:
    starts, ends, clock = [], [], 0.0
    for index, spent in enumerate(seconds):
        clock += gaps[index] if gaps else 0.0
        starts.append(clock)
        clock += spent
        ends.append(clock)
    count = len(seconds)
    kinds = tuple(KINDS[index % 3] for index in range(count))
    return DeviceTimeline(
        device=0, kinds=kinds, layers=(0,) * count, micro_batches=(0,) * count,
        starts=tuple(starts), ends=tuple(ends),
    )  # fmt: skip


@given(seconds=st.lists(st.floats(0, 1), min_size=1, max_size=60), shortest=st.floats(1e-3, 0.5))
def test_bars_keep_order_and_cover_the_same_time(seconds: list[float], shortest: float):
    full = lane(seconds)
    bars = list(merge_short_instructions(full, shortest))
    assert (bars[0].start, bars[-1].end) == (full.starts[0], full.ends[-1])
    assert all(a.end == b.start for a, b in pairwise(bars))


@given(seconds=st.lists(st.floats(0, 1), min_size=1, max_size=200))
def test_few_bars_are_shorter_than_the_limit(seconds: list[float]):
    full, shortest = lane(seconds), 0.3
    bars = list(merge_short_instructions(full, shortest))
    long = sum(spent >= shortest for spent in seconds)
    small = sum(bar.end - bar.start < shortest for bar in bars)
    # Each short bar is followed by a long instruction, or is the last.
    assert small <= long + 1


def test_long_instructions_keep_bars_of_their_own():
    bars = list(merge_short_instructions(lane([1.0, 1.0, 0.01, 0.01, 1.0]), 0.1))
    assert [bar.kind for bar in bars] == ["forward", "backward", "update", "backward"]
    assert bars[2].text.startswith("2 instructions: update, forward")
    assert bars[0].text == "forward of layer 0, micro-batch 0: 1.00 s from 0 s"


def test_many_short_instructions_become_few_columns_with_their_shares():
    steady = lane([1.0, 2.0, 1.0] * 4000)
    drawing = draw_timeline([(f"stage {index}", steady) for index in range(16)], "steady")
    assert "shares of the time" in drawing
    assert len(drawing) < 60_000
    columns = list(time_shares(steady, steady.ends[-1]))
    assert (columns[0].start, columns[-1].end) == (0.0, pytest.approx(steady.ends[-1]))
    assert all(a.end == b.start for a, b in pairwise(columns))
    assert columns[0].shares["backward"] == pytest.approx(0.5, abs=0.02)
    assert "shares of the time" not in draw_timeline([("stage 0", lane([1.0] * 300))], "few")


def test_gaps_stay_visible():
    bars = list(merge_short_instructions(lane([0.01, 0.01], gaps=[0.0, 1.0]), 0.1))
    assert len(bars) == 2


def test_predicted_is_above_measured_on_one_time_axis():
    predicted, measured = made_timeline(predicted=True), made_timeline(predicted=False)
    root = ET.fromstring(predicted_and_measured_timeline(predicted, measured))  # noqa: S314  our own drawing
    names = {t.text: float(t.get("y") or 0) for t in root.iter("{*}text")}
    names |= {t.text: float(t.get("y") or 0) for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert names["predicted"] < names["measured"]
    bars = root.iter("{http://www.w3.org/2000/svg}rect")
    ends = {
        float(r.get("y") or 0): float(r.get("x") or 0) + float(r.get("width") or 0)
        for r in bars
        if r.get("height") == "38"
    }
    above, below = sorted(ends)
    ratio = (ends[above] - 92) / (ends[below] - 92)
    longest = predicted.devices[0].ends[-1] / measured.devices[0].ends[-1]
    assert abs(ratio - longest) < 0.01


def test_each_rank_has_a_name():
    noise = random.Random(0)
    lanes = tuple(
        lane([noise.random() for _ in range(5)]).model_copy(update={"device": device})
        for device in range(3)
    )
    both = Timeline(predicted=True, devices=lanes), Timeline(predicted=False, devices=lanes)
    svg = predicted_and_measured_timeline(*both)
    positions = [
        svg.index(f">{name} {device}<") for device in range(3) for name in ("predicted", "measured")
    ]
    assert positions == sorted(positions)


def test_a_step_of_a_hundred_thousand_instructions_stays_small():
    svg = predicted_and_measured_timeline(
        Timeline(predicted=True, devices=(lane([1e-3] * 100_000),)), None
    )
    assert len(svg) < 1_000_000


def test_no_lanes_give_an_empty_drawing():
    ET.fromstring(predicted_and_measured_timeline(None, None))  # noqa: S314
    ET.fromstring(predicted_and_measured_timeline(Timeline(predicted=True, devices=()), None))  # noqa: S314
