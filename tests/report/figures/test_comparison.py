"""Pictures and tables of offers: the shortest step first, and nobody left out."""

import re
import xml.etree.ElementTree as ET

import pytest
from report.test_table import drawn

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.cost.predict import predict
from windlass.report.figures.comparison import batch_comparison_figure, machine_comparison_figure
from windlass.report.terminal.comparison_tables import batch_comparison_table, machine_comparison_table
from windlass.schema.comparison import MachineForecast
from windlass.schema.machine import Machine

SVG = "{http://www.w3.org/2000/svg}"
GRAPH = tiny_graph(layers=4, tied=False)
COLUMNS = 80
"""Of a terminal as it opens."""


def offer(name: str, *, slower: float = 1.0, micro: int = 2) -> MachineForecast:
    machine: Machine = tiny_machine(devices=4).model_copy(update={"name": name})
    machine = machine.model_copy(update={"device": machine.device.slowed_down(slower)})
    plan = tiny_plan(GRAPH, machine, data=4, micro=micro, sharding=(4, 4))
    return MachineForecast(
        machine=name, devices=4, global_batch=plan.global_batch, plan=plan,
        prediction=predict(plan, GRAPH, machine), infeasible_reason="",
    )  # fmt: skip


def refused(name: str) -> MachineForecast:
    return MachineForecast(machine=name, devices=1, global_batch=8, plan=None, prediction=None,
                 infeasible_reason="`tiny` does not fit: 3 GiB too little")  # fmt: skip


def bars(svg: str) -> dict[str, float]:
    """Widths of what the pointer reads."""
    return {
        text.split(":")[0]: float(rect.get("width", 0))
        for rect in ET.fromstring(svg).iter(f"{SVG}rect")  # noqa: S314  our own drawing
        if (text := rect.findtext(f"{SVG}title"))
    }


def test_machines_stand_by_their_time_and_those_without_a_plan_last():
    offers = [refused("small"), offer("slow", slower=50.0), offer("fast")]
    svg = machine_comparison_figure(offers, "tiny on all")
    widths = bars(svg)
    assert list(widths) == ["fast", "slow"]
    assert widths["fast"] < widths["slow"]
    names = re.findall(r">(fast|slow|small|tiny does not fit: 3 GiB too little)<", svg)
    assert names == ["fast", "slow", "small", "tiny does not fit: 3 GiB too little"]
    assert "Predicted" in svg


def test_batches_keep_their_order_and_are_as_long_as_they_are_fast():
    offers = [offer("tiny", micro=size) for size in (1, 4, 16)]
    widths = list(bars(batch_comparison_figure(offers, "tiny")).values())
    speeds = [each.tokens_per_second for each in offers]
    for width, speed in zip(widths, speeds, strict=True):
        assert width / widths[0] == pytest.approx(speed / speeds[0], rel=1e-3)


def test_tables_of_offers_fit_a_terminal():
    offers = [offer("dgx-a100-80gb:8"), offer("dgx-v100-32gb:64", slower=3.0)]
    for table in (machine_comparison_table(offers), batch_comparison_table(offers)):
        lines = drawn(table, COLUMNS).splitlines()
        assert max(map(len, lines)) <= COLUMNS
        assert not any("…" in line for line in lines)
