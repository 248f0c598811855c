"""The table of a run shows predicted beside measured numbers."""

import re
from collections.abc import Callable
from dataclasses import replace

from report.made_runs import on_busy_machine, on_two_stages, with_offload
from report.rendering import render
from windlass.report.terminal.run_tables import record_table
from windlass.tracking import RunRecord


def test_a_run_on_several_ranks_shows_how_long_each_waits(record: Callable[..., RunRecord]):
    text = render(record_table(on_two_stages(record(count=20))))
    assert re.search(r"0\s+stage 0\s+400 ms\s+0 s\s+3.00 GiB\s+█{20}", text)
    assert re.search(r"1\s+stage 1\s+300 ms\s+100 ms\s+2.00 GiB\s+█{15}\s", text)


def test_a_part_that_misses_its_prediction_is_named_although_the_step_does_not(
    record: Callable[..., RunRecord],
):
    run = record(count=60)
    assert run.prediction
    parts = dict(run.prediction.by_kind)
    moved = 0.3 * parts["forward"]
    parts |= {"forward": parts["forward"] - moved, "backward": parts["backward"] + moved}
    wrong = run.prediction.model_copy(update={"by_kind": parts})
    note = "parts of the step are far from their predictions: forward 1.5"
    assert note in render(record_table(replace(run, prediction=wrong)))
    assert "far from" not in render(record_table(run))


def test_a_single_device_has_no_table_of_ranks(record: Callable[..., RunRecord]):
    assert "waiting" not in render(record_table(record(count=20)))


def test_a_run_with_offload_shows_predicted_and_measured_traffic(
    record: Callable[..., RunRecord],
):
    text = render(record_table(with_offload(record(count=60))))
    for name, predicted, measured in (("read", "2.00", "2.02"), ("written", "1.00", "1.01")):
        (line,) = [line for line in text.splitlines() if line.startswith(f" {name} a step")]
        assert re.search(rf"{predicted} GiB +{measured} GiB +1\.01 ×", line)


def test_a_run_without_offload_has_no_rows_of_traffic(record: Callable[..., RunRecord]):
    assert "a step  " not in render(record_table(record(count=3)))


def test_a_run_shows_predicted_and_measured_time_with_the_ratio(record: Callable[..., RunRecord]):
    text = render(record_table(record(count=60)))
    (line,) = [line for line in text.splitlines() if line.startswith(" step time")]
    assert "645 ms" in line
    assert "1.06 ×" in line
    assert "finished" in text


def test_a_held_out_loss_stands_beside_what_the_frequencies_of_tokens_give(
    record: Callable[..., RunRecord],
):
    lines = render(record_table(record(count=60))).splitlines()
    (row,) = [row for row, line in enumerate(lines) if line.startswith("held out")]
    assert lines[row + 1].split()[0] == "6.310"


def test_a_run_on_a_busy_machine_says_so_and_that_its_time_is_outside_the_interval(
    record: Callable[..., RunRecord],
):
    idle = record(count=20)
    text = render(record_table(on_busy_machine(idle)))
    assert "the machine was busy: threads waited 38 % of the time" in text
    assert "outside its predicted 80 % interval, 600 ms to 703 ms" in text
    quiet = render(record_table(idle))
    assert "busy:" not in quiet
    assert "interval" not in quiet


def test_a_run_without_documents_is_shown(record: Callable[..., RunRecord]):
    files = ("plan.toml", "prediction.json", "graph.json", "request.toml", "machine.toml")
    text = render(record_table(record(count=0, without=files, state="interrupted")))
    assert "interrupted" in text
