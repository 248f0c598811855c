"""The picture of what models need: a dot where the number of devices is."""

import xml.etree.ElementTree as ET
from math import log2

import pytest

from windlass.report.figures.smallest_machine import smallest_machine_figure
from windlass.schema.comparison import SmallestMachine

SVG = "{http://www.w3.org/2000/svg}"


def need(model: str, family: str, devices: int | None, cut: str = "p1 t1 r1") -> SmallestMachine:
    return SmallestMachine(
        model=model, parameters=10**9, family=family, machine=family if devices else None,
        devices=devices, parallelism=cut if devices else None, prediction=None, machines_tried=(),
        infeasible_reason="too large",
    )  # fmt: skip


def test_each_need_is_a_dot_at_its_number_of_devices():
    counts = {"a": 1, "b": 8, "c": 64}
    svg = smallest_machine_figure([need(model, "pods", count) for model, count in counts.items()], "asked")
    dots = {
        text.split()[0]: float(dot.get("cx", 0))
        for dot in ET.fromstring(svg).iter(f"{SVG}circle")  # noqa: S314  our own drawing
        if (text := dot.findtext(f"{SVG}title"))
    }
    shares = {name: (x - dots["a"]) / (dots["c"] - dots["a"]) for name, x in dots.items()}
    for name, count in counts.items():
        assert shares[name] == pytest.approx(log2(count) / 6, abs=1e-3)


def test_degrees_of_one_are_left_out_and_what_has_no_machine_says_so():
    svg = smallest_machine_figure([need("a", "pods", 16, "p2 t8 r1"), need("b", "pods", None)], "asked")
    assert "16 = p2 × t8<" in svg
    assert "no pods is enough" in svg
    assert "too large" in svg
