"""Comparison figures and tables: the shortest step first, and no machine left out."""

import re
import xml.etree.ElementTree as ET

import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from report.rendering import render
from windlass.cost.predict import predict_plan
from windlass.report.figures.comparison import batch_comparison_figure, machine_comparison_figure
from windlass.report.terminal.comparison_tables import (
    batch_comparison_table,
    machine_comparison_table,
)
from windlass.schema.answers.comparison import MachineForecast
from windlass.schema.machine import Machine

SVG = "{http://www.w3.org/2000/svg}"
GRAPH = tiny_graph(layers=4, tied=False)
COLUMNS = 80
"""Columns of a terminal window by default."""


def forecast(name: str, *, slower: float = 1.0, micro: int = 2) -> MachineForecast:
    machine: Machine = tiny_machine(devices=4).model_copy(update={"name": name})
    machine = machine.model_copy(update={"device": machine.device.slowed_down(slower)})
    plan = tiny_plan(GRAPH, machine, data=4, micro=micro, sharding=(4, 4))
    return MachineForecast(
        machine=name, devices=4, global_batch=plan.global_batch, plan=plan,
        prediction=predict_plan(plan, GRAPH, machine), infeasible_reason="",
    )  # fmt: skip


def refused(name: str) -> MachineForecast:
    return MachineForecast(machine=name, devices=1, global_batch=8, plan=None, prediction=None,
                 infeasible_reason="`tiny` does not fit: 3 GiB too little")  # fmt: skip


def bars(svg: str) -> dict[str, float]:
    """Widths of the bars by the name in their tooltip."""
    return {
        text.split(":")[0]: float(rect.get("width", 0))
        for rect in ET.fromstring(svg).iter(f"{SVG}rect")  # noqa: S314  our own drawing
        if (text := rect.findtext(f"{SVG}title"))
    }


def test_machines_are_sorted_by_step_time_with_those_without_a_plan_last():
    forecasts = [refused("small"), forecast("slow", slower=50.0), forecast("fast")]
    svg = machine_comparison_figure(forecasts, "tiny on all")
    widths = bars(svg)
    assert list(widths) == ["fast", "slow"]
    assert widths["fast"] < widths["slow"]
    names = re.findall(r">(fast|slow|small|tiny does not fit: 3 GiB too little)<", svg)
    assert names == ["fast", "slow", "small", "tiny does not fit: 3 GiB too little"]
    assert "Predicted" in svg


def test_batches_keep_their_order_and_bars_are_proportional_to_speed():
    forecasts = [forecast("tiny", micro=size) for size in (1, 4, 16)]
    widths = list(bars(batch_comparison_figure(forecasts, "tiny")).values())
    speeds = [item.tokens_per_second for item in forecasts]
    for width, speed in zip(widths, speeds, strict=True):
        assert width / widths[0] == pytest.approx(speed / speeds[0], rel=1e-3)


def test_comparison_tables_fit_a_terminal():
    forecasts = [forecast("dgx-a100-80gb:8"), forecast("dgx-v100-32gb:64", slower=3.0)]
    for table in (machine_comparison_table(forecasts), batch_comparison_table(forecasts)):
        lines = render(table, COLUMNS).splitlines()
        assert max(map(len, lines)) <= COLUMNS
        assert not any("…" in line for line in lines)
