"""The figure of smallest machines: a dot at each number of devices."""

import xml.etree.ElementTree as ET
from math import log2

import pytest

from windlass.report.figures.smallest_machine import smallest_machine_figure
from windlass.schema.answers.comparison import SmallestMachine

SVG = "{http://www.w3.org/2000/svg}"


def result(
    model: str, family: str, devices: int | None, parallelism: str = "PP=1 TP=1 DP=1"
) -> SmallestMachine:
    return SmallestMachine(
        model=model, parameters=10**9, family=family, machine=family if devices else None,
        devices=devices, parallelism=parallelism if devices else None, prediction=None,
        machines_tried=(), infeasible_reason="too large",
    )  # fmt: skip


def test_each_result_is_a_dot_at_its_number_of_devices():
    counts = {"a": 1, "b": 8, "c": 64}
    svg = smallest_machine_figure(
        [result(model, "pods", count) for model, count in counts.items()], "asked"
    )
    dots = {
        text.split()[0]: float(dot.get("cx", 0))
        for dot in ET.fromstring(svg).iter(f"{SVG}circle")  # noqa: S314  our own drawing
        if (text := dot.findtext(f"{SVG}title"))
    }
    shares = {name: (x - dots["a"]) / (dots["c"] - dots["a"]) for name, x in dots.items()}
    for name, count in counts.items():
        assert shares[name] == pytest.approx(log2(count) / 6, abs=1e-3)


def test_degrees_of_one_are_left_out_and_a_missing_machine_is_stated():
    svg = smallest_machine_figure(
        [result("a", "pods", 16, "PP=2 TP=8 DP=1"), result("b", "pods", None)], "asked"
    )
    assert "16 = PP 2 × TP 8<" in svg
    assert "no pods is large enough" in svg
    assert "too large" in svg
