"""The live view compares the run with its prediction and fits a terminal."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from report.made_runs import make_record, prediction, steps, with_offload
from report.rendering import render
from windlass.report.terminal.live_view import TrainingView, sparkline


def view(count: int) -> TrainingView:
    made = TrainingView("gpt-tiny", 300, prediction())
    for step in list(steps(300))[:count]:
        made.update(step)
    return made


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("count", [0, 1, 117, 300])
def test_the_display_fits_its_terminal(width: int, count: int):
    assert max(map(len, render(view(count), width).splitlines())) <= width


def test_the_display_shows_loss_speed_ratio_mfu_memory_and_time_left():
    text = render(view(117), 80)
    for words in (
        "step 117 of 300", "left", "loss      3.305", "bits per byte", "tokens/s",
        "× predicted 645 ms", "GFLOP / (", "of 22.0 GiB", "saved     step-100",
    ):  # fmt: skip
        assert words in text


def test_a_line_names_memory_only_where_it_is_more_than_predicted():
    made = view(5)
    assert "memory" not in made.line()
    last = list(steps(6))[-1]
    made.update(replace(last, memory_bytes=round(1.49 * prediction().peaks[0].peak_bytes)))
    assert "memory 1.49 × predicted" in made.line()


def test_the_display_of_a_run_with_offload_shows_measured_and_predicted_traffic(tmp_path: Path):
    record = with_offload(make_record(tmp_path, count=5))
    made = TrainingView("gpt-tiny", 5, record.prediction)
    for step in record.steps:
        made.update(step)
    text = " ".join(render(made, 160).split())
    assert "2.02 GiB read and 1.01 GiB written a step" in text
    assert "1.01 × and 1.01 × predicted 2.00 GiB and 1.00 GiB" in text
    assert "traffic" not in render(view(5), 160)


def test_before_the_first_step_the_display_says_what_it_waits_for():
    text = render(view(0), 80)
    assert "waiting for the first step, predicted 645 ms after 14.0 s of compiling" in text


def test_the_compiling_first_step_does_not_count_once_there_is_a_second():
    seconds = view(5).step_seconds
    assert seconds is not None
    assert seconds < 1


def test_the_display_of_a_resumed_run_starts_at_its_last_step():
    earlier = tuple(steps(300))[:150]
    text = render(TrainingView("gpt-tiny", 300, None, earlier), 80)
    assert "step 150 of 300" in text


def test_a_line_holds_one_step():
    line = view(100).line()
    assert "\n" not in line
    assert line.startswith("step 100/300, loss ")
    assert "× predicted" in line
    assert "held out" in line
    assert "saved step-100" in line
    assert TrainingView("x", 9, None).line() == "step 0/9"


def test_a_line_says_that_the_machine_was_busy():
    made = TrainingView("gpt-tiny", 300, prediction())
    for step in list(steps(300))[:5]:
        made.update(replace(step, contention=0.38))
    words = "the machine was busy: threads waited 38 % of the time"
    assert words in made.line()
    assert words in render(made, 80)
    assert "busy" not in view(5).line()


def test_a_loss_that_is_not_finite_is_shown_as_such():
    made = view(3)
    made.update(replace(next(iter(steps(1))), step=4, loss=math.nan, seconds=0.7))
    assert "not finite" in render(made, 80)
    assert "loss not finite" in made.line()


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200))
def test_a_sparkline_has_at_most_one_block_for_each_cell(values: list[float]):
    assert len(sparkline(values, 24)) <= 24


def test_a_sparkline_of_falling_values_falls():
    assert sparkline([4.0, 3.0, 2.0, 1.0], 4) == "█▆▃▁"
