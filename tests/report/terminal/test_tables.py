"""Tables tell what documents hold, and every forecast says that it is one."""

import math
import re
from collections.abc import Callable
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from report.made_runs import graph, plan, prediction, shared, streaming
from windlass.report.terminal.tables import (
    bar,
    plan_table,
    prediction_table,
    record_table,
    runners_up_table,
    runs_table,
)
from windlass.schema.plan import Offload, ShardingDegrees
from windlass.tracking import RunRecord, list_runs


def drawn(table: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_plan_is_told_in_words():
    text = drawn(plan_table(plan(), graph()))
    assert "gpt-tiny: 5.77 M parameters in 8 layers" in text
    assert "16 sequences of 256 tokens a step, in 4 micro-batches of 4" in text
    assert "bfloat16 with float32 master weights, compiled" in text


def test_a_plan_says_how_many_replicas_share_what():
    alone = plan()
    cut = alone.parallel.model_copy(update={"data": 4})
    sharding = ShardingDegrees(parameters=1, optimizer=2)
    text = drawn(plan_table(alone.model_copy(update={"parallel": cut, "sharding": sharding})), 120)
    assert "each replica has all weights (rts); 2 replicas share optimizer state (rts')" in text
    assert "sharding" not in drawn(plan_table(alone))


def test_every_number_of_a_prediction_stands_under_the_word_predicted():
    text = drawn(prediction_table(prediction()))
    for block in text.split("\n\n"):
        assert block.strip() == "" or block.lstrip().startswith("predicted")
    assert "49.2 % = 130 GFLOP / (645 ms × 410 GFLOP/s)" in text
    assert "80 % interval" in text
    assert "528 MiB of 22.0 GiB" in text


def test_terms_and_kinds_are_listed_with_the_largest_first():
    text = drawn(prediction_table(prediction()))
    found = [text.index(f"\n{name} ") for name in ("matmul", "traffic", "attention", "launch")]
    assert found == sorted(found)


def test_a_run_on_several_devices_tells_of_each_how_long_it_waits(record: Callable[..., RunRecord]):
    text = drawn(record_table(shared(record(count=20))))
    assert re.search(r"0\s+stage 0\s+400 ms\s+0 s\s+3.00 GiB\s+█{20}", text)
    assert re.search(r"1\s+stage 1\s+300 ms\s+100 ms\s+2.00 GiB\s+█{15}\s", text)


def test_one_device_has_no_table_of_devices(record: Callable[..., RunRecord]):
    assert "waits" not in drawn(record_table(record(count=20)))


def test_a_streamed_run_shows_its_traffic_beside_what_was_predicted(
    record: Callable[..., RunRecord],
):
    text = drawn(record_table(streaming(record(count=60))))
    for name, predicted, measured in (("read", "2.00", "2.02"), ("written", "1.00", "1.01")):
        (line,) = [line for line in text.splitlines() if line.startswith(f" {name} a step")]
        assert re.search(rf"{predicted} GiB +{measured} GiB +1\.01 ×", line)


def test_a_run_in_memory_has_no_rows_of_traffic(record: Callable[..., RunRecord]):
    assert "a step  " not in drawn(record_table(record(count=3)))


def test_a_streamed_plan_says_what_it_writes_a_step_and_over_the_run(
    record: Callable[..., RunRecord],
):
    told = streaming(record(count=3)).prediction
    assert told is not None
    streamed = plan().model_copy(update={"offload": Offload(optimizer="disk")})
    text = drawn(prediction_table(told, plan=streamed, steps=400))
    assert "predicted wear" in text
    assert "writes 1.00 GiB a step to disk, 400 GiB over 400 steps" in text


def test_what_does_not_fit_says_by_how_much():
    peak = prediction().peaks[0].model_copy(update={"capacity_bytes": 500 * 2**20})
    text = drawn(prediction_table(prediction().model_copy(update={"peaks": (peak,)})))
    assert re.search(r"of 500 MiB, \d+\.\d MiB too much", text)


def test_runners_up_tell_why_they_lost():
    text = drawn(runners_up_table([(plan(), prediction(), "slower"), (plan(), None, "too big")]))
    assert "all numbers predicted" in text
    assert "645 ms" in text
    assert "too big" in text


def test_a_run_shows_predicted_beside_measured_with_the_ratio(record: Callable[..., RunRecord]):
    text = drawn(record_table(record(count=60)))
    (line,) = [line for line in text.splitlines() if line.startswith(" step time")]
    assert "645 ms" in line
    assert "1.06 ×" in line
    assert "finished" in text


def test_a_bare_run_is_shown_as_far_as_it_goes(record: Callable[..., RunRecord]):
    files = ("plan.toml", "prediction.json", "graph.json", "request.toml", "machine.toml")
    text = drawn(record_table(record(count=0, without=files, state="interrupted")))
    assert "interrupted" in text


def test_the_list_of_runs_fits_in_80_columns(record: Callable[..., RunRecord]):
    for state in ("finished", "interrupted", "broken"):
        run = record(count=30, state=state)
    lines = drawn(runs_table(list_runs(run.folder.parent), 2e9)).splitlines()
    assert max(map(len, lines)) <= 80
    assert all("gpt-tiny" in line for line in lines[-4:-1])


def test_names_with_markup_are_shown_as_they_are(record: Callable[..., RunRecord]):
    run = record(count=1, name="[bold]x[/]")
    assert "[bold]x[/]" in drawn(runs_table(list_runs(run.folder.parent), 2e9), 120)


@given(share=st.floats(0, 1))
def test_a_bar_is_as_long_as_its_share(share: float):
    assert math.isclose(len(bar(share, 20)), share * 20, abs_tol=1.0)


@pytest.mark.parametrize("share", [-1.0, 2.0])
def test_a_bar_stays_in_its_cells(share: float):
    assert len(bar(share, 20)) in (0, 20)
