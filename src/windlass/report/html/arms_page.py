"""The page of an experiment with several arms: curves with noise bands, losses, scores, costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from windlass.judge import BUDGET_NAMES, Arm, Band, Budget, Comparison, band, relation
from windlass.report.figures.line_chart import ChartAxes, ChartSeries, ReferenceLine, line_chart
from windlass.report.figures.svg import (
    PALETTE_CSS,
    STAGE_COLOURS,
    SVG_CSS,
    UNITLESS,
    AxisUnit,
    seconds_unit,
)
from windlass.report.html.assets import PAGE_CSS, PAGE_SCRIPT
from windlass.units import format_count, format_flop, format_seconds

_LOSS_NOTE = (
    "Median of the seeds in nats per token, with the lowest and the highest; * marks the best, and "
    "what equals it within noise."
)
_SHOWN_FROM = 0.15
"""Share of the first arm's budget from which on losses fit into a chart; earlier ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFacts:
    """What an arm is, and what its runs took."""

    name: str
    meaning: str
    """In a sentence without a full stop."""
    parameters: int
    token_flop: tuple[float, ...]
    """FLOP of a token, in each part of the run."""
    steps: int
    predicted_seconds: float
    """Predicted time of all steps of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmScore:
    """Accuracy of an arm on a task, as the mean over seeds."""

    arm: str
    budget: Budget
    step: int
    """Step of the checkpoint, the nearest to the budget."""
    task: str
    shots: int
    accuracy: float
    error: float
    """Standard error over the questions."""
    normalised: float
    """Accuracy by log-likelihood per character."""
    normalised_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmsReport:
    """An experiment with several arms, as its page and its tables show it."""

    heading: str
    notes: tuple[str, ...]
    """How it was made, a sentence each."""
    sentences: tuple[str, ...]
    """What was found."""
    arms: tuple[Arm, ...]
    """The first one is what the others are compared with."""
    facts: tuple[ArmFacts, ...]
    """In the same order."""
    comparisons: tuple[Comparison, ...]
    scores: tuple[ArmScore, ...]
    questions: int
    chance: float
    """Accuracy of a guess."""


def arms_page(report: ArmsReport) -> str:
    """The HTML page, one self-contained file."""
    found = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.sentences)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    body = (
        f'<header><div class="brand">Windlass recipe</div><h1>{escape(report.heading)}</h1>'
        f"{found}</header>"
        + _section("Held-out loss", f'<p class="note">{_LOSS_NOTE}</p>{_table(loss_table(report))}')
        + "".join(_curves(report))
        + (_section("Questions about code", _scores(report)) if report.scores else "")
        + _section("What it took", _table(cost_table(report)))
        + _section("How it was made", f"<ul>{notes}</ul>")
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(report.heading)} – Windlass</title>"
        f"<style>{PALETTE_CSS}{SVG_CSS}{PAGE_CSS}</style></head>"
        f"<body><main>{body}</main><script>{PAGE_SCRIPT}</script></body></html>\n"
    )


Rows = list[tuple[str, ...]]
"""A table of words, its heads first."""


def loss_table(report: ArmsReport) -> Rows:
    """Median loss of each arm at each budget, lowest to highest; `*` marks the best and equals."""
    budgets = (
        f"at equal {BUDGET_NAMES[one.budget]} ({_amount(one.budget, one.amount)})"
        for one in report.comparisons
    )
    rows: Rows = [("arm", *budgets)]
    for arm in report.arms:
        cells = [_loss_cell(one, arm.name) for one in report.comparisons]
        rows.append((arm.name, *cells))
    return rows


def _loss_cell(comparison: Comparison, arm: str) -> str:
    found = comparison.bands[arm]
    if found is None:
        return "not reached"
    known = [other for other in comparison.bands.values() if other is not None]
    best = min(known, key=lambda other: other.middle)
    mark = " *" if found is best or relation(best, found) == "equal" else ""
    return f"{found.middle:.3f} ({found.low:.3f} to {found.high:.3f}){mark}"


def score_table(report: ArmsReport) -> Rows:
    """Accuracy of each arm at each budget, with its standard error."""
    asked = list(dict.fromkeys((one.task, one.shots) for one in report.scores))
    heads = ("arm", "at equal", "step", *(f"{task}, {_shots(shots)}" for task, shots in asked))
    rows: Rows = [heads]
    for comparison in report.comparisons:
        for arm in report.arms:
            own = {
                (one.task, one.shots): one
                for one in report.scores
                if one.arm == arm.name and one.budget == comparison.budget
            }
            if not own:
                continue
            step = str(next(iter(own.values())).step)
            cells = [_score_cell(own[key]) if key in own else "–" for key in asked]
            rows.append((arm.name, BUDGET_NAMES[comparison.budget], step, *cells))
    return rows


def _score_cell(score: ArmScore) -> str:
    plain = f"{100 * score.accuracy:.1f} ± {100 * score.error:.1f}"
    return f"{plain} ({100 * score.normalised:.1f} ± {100 * score.normalised_error:.1f})"


def cost_table(report: ArmsReport) -> Rows:
    """Size, FLOP and wall time of each arm, and the predicted time."""
    heads = (
        "arm", "weights", "FLOP a token", "steps", "tokens", "FLOP", "wall time", "predicted time",
        "what it is",
    )  # fmt: skip
    rows: Rows = [heads]
    for arm, facts in zip(report.arms, report.facts, strict=True):
        seconds = arm.total("seconds")
        rows.append(
            (
                facts.name,
                format_count(facts.parameters),
                ", then ".join(format_flop(flop) for flop in facts.token_flop),
                str(facts.steps),
                format_count(arm.total("tokens").middle),
                format_flop(arm.total("flop").middle),
                _band(seconds),
                format_seconds(facts.predicted_seconds),
                facts.meaning,
            )
        )
    return rows


def _band(seconds: Band) -> str:
    low, middle, high = map(format_seconds, seconds)
    return middle if low == high else f"{middle} ({low} to {high})"


def _curves(report: ArmsReport) -> Iterator[str]:
    """A chart of all arms for each budget."""
    for comparison in report.comparisons:
        budget = comparison.budget
        unit = _unit(budget, max(arm.total(budget).high for arm in report.arms))
        series = [
            _series(arm, budget, f"var(--{colour})")
            for arm, colour in zip(report.arms, STAGE_COLOURS, strict=False)
        ]
        shown = [
            high
            for one in series
            for x, high in zip(one.xs, (one.spread or ((), ()))[1], strict=True)
            if x >= _SHOWN_FROM * comparison.amount
        ]
        axes = ChartAxes(
            x_name=BUDGET_NAMES[budget], y_name="held-out loss", x_unit=unit,
            y_max=max(shown) if shown else None,
        )  # fmt: skip
        name = f"held-out loss over {BUDGET_NAMES[budget]}"
        end = _amount(budget, comparison.amount)
        reference = ReferenceLine(
            name=f"{report.arms[0].name}, after {end}",
            y=median(curve.losses[-1] for curve in report.arms[0].curves),
            colour="var(--grey)",
        )
        svg = line_chart(name, series, axes, [reference])
        yield _section(
            f"Over {BUDGET_NAMES[budget]}",
            '<p class="note">Nats per token on text that is never trained on: median of the seeds, '
            f'and the band from the lowest to the highest.</p><figure class="chart">{svg}</figure>',
        )


def _series(arm: Arm, budget: Budget, colour: str) -> ChartSeries:
    """The median of the seeds at each evaluation, with the band of all."""
    count = min(len(curve.losses) for curve in arm.curves)
    bands = [band([curve.losses[index] for curve in arm.curves]) for index in range(count)]
    return ChartSeries(
        name=arm.name,
        xs=[median(curve.used(budget)[index] for curve in arm.curves) for index in range(count)],
        ys=[one.middle for one in bands],
        colour=colour,
        spread=([one.low for one in bands], [one.high for one in bands]),
    )


def _scores(report: ArmsReport) -> str:
    note = (
        f"Percent of {report.questions} questions with four choices, ± standard error over the "
        f"questions, as the mean of the seeds; a guess is right in {100 * report.chance:.0f} %. In "
        "parentheses by log-likelihood per character. The checkpoint is the nearest one."
    )
    return f'<p class="note">{note}</p>{_table(score_table(report))}'


def _table(rows: Sequence[Sequence[str]]) -> str:
    heads, *others = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in others)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _section(name: str, content: str) -> str:
    return f"<section><h2>{escape(name)}</h2>{content}</section>"


def _unit(budget: Budget, largest: float) -> AxisUnit:
    """The unit of an axis that reaches `largest`."""
    if budget == "seconds":
        return seconds_unit(largest)
    name = "FLOP" if budget == "flop" else ""
    for scale, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if largest >= scale:
            return AxisUnit(scale, letter + name)
    return UNITLESS


def _amount(budget: Budget, amount: float) -> str:
    """Such as `1.05 M tokens`, `12.7 TFLOP` or `2 min 10 s`."""
    if budget == "tokens":
        return f"{format_count(amount)} tokens"
    return format_flop(amount) if budget == "flop" else format_seconds(amount)


def _shots(shots: int) -> str:
    return "zero-shot" if shots == 0 else f"{shots}-shot"
