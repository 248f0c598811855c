"""The figure of a sweep: lines of trials over axes, and bars of importance."""

import xml.etree.ElementTree as ET

import pytest

from windlass.report.figures.sweep_figure import SweepAxis, SweepLine, sweep_figure


def test_a_trial_is_a_line_through_its_values_and_names_them() -> None:
    axes = (
        SweepAxis(name="rate", low=1e-4, high=1e-2, log=True),
        SweepAxis(name="kind", low=0, high=1, choices=("<a>", "b")),
        SweepAxis(name="loss", low=1, high=3),
    )
    lines = (
        SweepLine(number=0, values=(1e-3, 0, 1), rank=0),
        SweepLine(number=1, values=(1e-4, 1, 3), rank=1, is_pruned=True),
    )

    svg = sweep_figure(axes, lines, {"rate": 0.8, "kind": 0.1}, "a sweep")

    ET.fromstring(svg)  # noqa: S314  our own text
    assert "trial 0: rate 0.001, kind &lt;a&gt;, loss 1" in svg
    assert svg.count("stroke-dasharray") == 1
    assert "80%" in svg


def test_a_logarithmic_axis_is_divided_by_equal_ratios() -> None:
    axis = SweepAxis(name="rate", low=1e-4, high=1e-2, log=True)

    assert axis.share(1e-3) == pytest.approx(0.5)
    assert SweepAxis(name="loss", low=2, high=2).share(2) == 0.5
