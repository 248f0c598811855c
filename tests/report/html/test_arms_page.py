"""The page of an experiment with several arms."""

import re
import xml.etree.ElementTree as ET

import pytest

from windlass.judge.arm_comparison import Arm, ArmCurve, compare_arms
from windlass.report.html.arms_page import (
    ArmFacts,
    ArmScore,
    ArmsReport,
    arms_page,
    cost_table,
    loss_table,
    score_table,
)


def made_arm(name: str, losses: list[float], spread: float = 0.1) -> Arm:
    counts = range(1, len(losses) + 1)
    curves = [
        ArmCurve(
            seed=seed,
            steps=tuple(10 * n for n in counts),
            tokens=tuple(1000.0 * n for n in counts),
            flop=tuple(1e12 * n for n in counts),
            seconds=tuple((3.0 + seed) * n for n in counts),
            losses=tuple(loss + spread * (seed - 1) for loss in losses),
        )
        for seed in range(3)
    ]
    return Arm(name=name, curves=tuple(curves))


@pytest.fixture
def report() -> ArmsReport:
    arms = (made_arm("dense <all>", [5, 4.5, 4, 3.5]), made_arm("sparse", [6, 5, 4, 3.6, 3.4]))
    facts = [
        ArmFacts(
            name=arm.name, meaning="something", parameters=1_600_000, token_flop=(1e7, 4e6),
            steps=40, predicted_seconds=12.0,
        )
        for arm in arms
    ]  # fmt: skip
    scores = [
        ArmScore(
            arm=arm.name, budget="flop", step=40, task="next-line", shots=shots, accuracy=0.5,
            error=0.04, normalised=0.55, normalised_error=0.05,
        )
        for arm in arms
        for shots in (0, 2)
    ]  # fmt: skip
    return ArmsReport(
        heading="made, tiny, 3 seeds", notes=("How & why.",), sentences=("Dense < sparse.",),
        arms=arms, facts=tuple(facts), comparisons=compare_arms(arms), scores=tuple(scores),
        questions=150, chance=0.25,
    )  # fmt: skip


def test_the_page_shows_every_table_curve_and_sentence_and_is_well_formed(
    report: ArmsReport,
) -> None:
    page = arms_page(report)

    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 3
    for svg in charts:
        ET.fromstring(svg)  # noqa: S314  our own drawing
        assert svg.count('opacity:.2"') == 2, "a band for each arm"
    for text in ("Dense &lt; sparse.", "How &amp; why.", "dense &lt;all&gt;", "50.0 ± 4.0"):
        assert text in page
    assert "<all>" not in page
    assert not re.search(r"(src|href)=", page)


def test_losses_stand_with_their_band_and_the_best_is_marked_with_its_equals(
    report: ArmsReport,
) -> None:
    heads, dense, sparse = loss_table(report)

    assert heads == (
        "arm", "at equal tokens (4.00 k tokens)", "at equal FLOP (4.00 TFLOP)",
        "at equal wall time (16.0 s)",
    )  # fmt: skip
    assert dense[:2] == ("dense <all>", "3.500 (3.400 to 3.600) *")
    assert sparse[1] == "3.600 (3.500 to 3.700) *"
    apart = ArmsReport(
        **{name: getattr(report, name) for name in ArmsReport.__slots__}
        | {"comparisons": compare_arms((made_arm("dense <all>", [3]), made_arm("sparse", [4])))}
    )
    assert loss_table(apart)[2][1] == "4.000 (3.900 to 4.100)"


def test_scores_and_costs_have_a_row_for_each_arm(report: ArmsReport) -> None:
    heads, *rows = score_table(report)

    assert heads[3:] == ("next-line, zero-shot", "next-line, 2-shot")
    assert rows[0] == (
        "dense <all>", "FLOP", "40", "50.0 ± 4.0 (55.0 ± 5.0)", "50.0 ± 4.0 (55.0 ± 5.0)",
    )  # fmt: skip
    assert len(rows) == 2
    _, dense, sparse = cost_table(report)
    assert dense[1:] == (
        "1.60 M", "10.0 MFLOP, then 4.00 MFLOP", "40", "4.00 k", "4.00 TFLOP",
        "16.0 s (12.0 s to 20.0 s)", "12.0 s", "something",
    )  # fmt: skip
    assert sparse[0] == "sparse"
