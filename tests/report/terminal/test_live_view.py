"""The live display sets the run beside its prediction and fits a terminal."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from report.made_runs import make_record, prediction, steps, streaming
from windlass.report.terminal.live_view import TrainingView, sparkline


def drawn(view: TrainingView, width: int) -> str:
    console = Console(width=width, file=StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def view(count: int) -> TrainingView:
    made = TrainingView("gpt-tiny", 300, prediction())
    for step in list(steps(300))[:count]:
        made.update(step)
    return made


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("count", [0, 1, 117, 300])
def test_the_display_fits_its_terminal(width: int, count: int):
    assert max(map(len, drawn(view(count), width).splitlines())) <= width


def test_the_display_tells_loss_speed_ratio_mfu_memory_and_time_left():
    text = drawn(view(117), 80)
    for words in (
        "step 117 of 300", "left", "loss      3.305", "bits per byte", "tokens/s",
        "× predicted 645 ms", "GFLOP / (", "of 22.0 GiB", "saved     step-100",
    ):  # fmt: skip
        assert words in text


def test_the_display_of_a_streamed_run_tells_measured_and_predicted_traffic(tmp_path: Path):
    record = streaming(make_record(tmp_path, count=5))
    made = TrainingView("gpt-tiny", 5, record.prediction)
    for step in record.steps:
        made.update(step)
    text = " ".join(drawn(made, 160).split())
    assert "2.02 GiB read and 1.01 GiB written a step" in text
    assert "1.01 × and 1.01 × predicted 2.00 GiB and 1.00 GiB" in text
    assert "traffic" not in drawn(view(5), 160)


def test_before_the_first_step_the_display_says_what_it_waits_for():
    text = drawn(view(0), 80)
    assert "waiting for the first step, predicted 645 ms after 14.0 s of compiling" in text


def test_the_compiling_first_step_does_not_count_once_there_is_a_second():
    seconds = view(5).step_seconds
    assert seconds is not None
    assert seconds < 1


def test_a_resumed_run_goes_on_where_it_was():
    seen = tuple(steps(300))[:150]
    text = drawn(TrainingView("gpt-tiny", 300, None, seen), 80)
    assert "step 150 of 300" in text


def test_a_line_holds_one_step():
    line = view(100).line()
    assert "\n" not in line
    assert line.startswith("step 100/300, loss ")
    assert "× predicted" in line
    assert "held out" in line
    assert "saved step-100" in line
    assert TrainingView("x", 9, None).line() == "step 0/9"


def test_a_loss_that_is_no_number_is_shown_as_such():
    made = view(3)
    made.update(replace(next(iter(steps(1))), step=4, loss=math.nan, seconds=0.7))
    assert "no number" in drawn(made, 80)
    assert "loss no number" in made.line()


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200))
def test_a_curve_has_a_block_for_each_cell(values: list[float]):
    assert len(sparkline(values, 24)) <= 24


def test_a_falling_curve_falls():
    assert sparkline([4.0, 3.0, 2.0, 1.0], 4) == "█▆▃▁"
