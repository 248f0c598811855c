"""The figure of a layer's edges, and the curves against sparsity."""

import xml.etree.ElementTree as ET

import pytest

from cost.dataflow.subjects import chip, subject
from windlass.cost.dataflow.dataflow_report import dataflow_report
from windlass.report.figures.dataflow import dataflow_figure, machines_curves_figure
from windlass.schema.answers.dataflow import DataflowReport

SVG = "{http://www.w3.org/2000/svg}"
SPARSITIES = (0.0, 0.5, 0.75, 0.875, 0.95)


def report(
    on_chip_bytes: int = 10**9, sparsities: tuple[float, ...] = SPARSITIES
) -> DataflowReport:
    return dataflow_report(subject(), chip(on_chip_bytes), sparsities)


def arrows(svg: str, fill: str) -> list[str]:
    """Titles of the block arrows of one colour; those of the legend have none."""
    return [
        title
        for arrow in ET.fromstring(svg).iter(f"{SVG}polygon")  # noqa: S314  our own drawing
        if f"fill:var(--{fill})" in (arrow.get("style") or "")
        and (title := arrow.findtext(f"{SVG}title"))
    ]


def test_the_published_megabytes_stand_beside_each_degree_of_fusion():
    svg = dataflow_figure(report())
    for words in ("797 MB of far memory", "629 MB of far memory", "461 MB of far memory"):
        assert words in svg
    assert "All numbers are predicted" in svg


def test_white_arrows_go_through_far_memory_and_grey_ones_stay_on_the_chip():
    svg = dataflow_figure(report(sparsities=()))
    # Kernel by kernel two weights, three operands and three results; two fewer at each step.
    assert len(arrows(svg, "card")) == 8 + 6 + 4
    assert len(arrows(svg, "grey")) == 0 + 1 + 2


def test_a_section_that_does_not_fit_is_drawn_as_what_a_larger_chip_would_do():
    svg = dataflow_figure(report(40 * 10**6))
    assert "does not fit this chip" in svg
    assert svg.count("629 MB of far memory") == 2
    assert svg.count("461 MB of far memory") == 1


@pytest.mark.parametrize("count", [1, 5])
def test_each_curve_has_a_point_for_each_sparsity(count: int):
    svg = machines_curves_figure([report(sparsities=SPARSITIES[:count])] * 2)
    points = list(ET.fromstring(svg).iter(f"{SVG}circle"))  # noqa: S314  our own drawing
    assert len(points) == 2 * (3 + 1 + 3) * count
