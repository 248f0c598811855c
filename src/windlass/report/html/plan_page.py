"""The page of a plan before it runs: one self-contained HTML file, every number predicted."""

from html import escape

from windlass.report.figures.figure_sheet import PLAN_FIGURES, figure_notes
from windlass.report.figures.svg import PALETTE_CSS, SVG_CSS
from windlass.report.formatting import describe_graph, describe_plan, format_mfu, format_speed
from windlass.report.html.assets import PAGE_CSS, PAGE_SCRIPT
from windlass.report.plan_forecast import PlanForecast
from windlass.units import format_bytes, format_seconds


def plan_page(forecast: PlanForecast) -> str:
    """The HTML page of a plan."""
    notes = figure_notes(forecast)
    sections = (
        _section(heading, notes[name], _figure(name, draw(forecast)))
        for name, (heading, draw) in PLAN_FIGURES.items()
    )
    text = escape(forecast.plan.to_toml())
    plan = f"<details><summary>as TOML</summary><pre>{text}</pre></details>"
    body = (
        _header(forecast)
        + _tiles(forecast)
        + "".join(sections)
        + _section("Plan", "The plan file.", plan)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(forecast.title)}, predicted – Windlass</title>"
        f"<style>{PALETTE_CSS}{SVG_CSS}{PAGE_CSS}</style></head>"
        f"<body><main>{body}</main><script>{PAGE_SCRIPT}</script></body></html>\n"
    )


def _header(forecast: PlanForecast) -> str:
    sentence = describe_plan(forecast.plan, forecast.graph)
    return (
        '<header><div class="brand">Windlass plan</div>'
        f'<h1>{escape(forecast.title)}<span class="pill prepared">predicted</span></h1>'
        f"<p>{escape(describe_graph(forecast.graph))}.</p>"
        f"<p>{escape(sentence[:1].upper() + sentence[1:])}.</p></header>"
    )


def _tiles(forecast: PlanForecast) -> str:
    prediction = forecast.prediction
    low, high = format_seconds(prediction.low_seconds), format_seconds(prediction.high_seconds)
    peak = prediction.peaks[0]
    tiles = [
        (
            "predicted step",
            format_seconds(prediction.step_seconds),
            f"80 % interval {low} to {high}",
        ),
        (
            "predicted speed",
            format_speed(prediction.tokens_per_second, prediction.unit),
            "over all replicas",
        ),
        (
            "predicted MFU",
            f"{100 * prediction.mfu:.1f} %",
            format_mfu(prediction, prediction.step_seconds),
        ),
        (
            f"predicted peak in {peak.tier}",
            format_bytes(peak.peak_bytes),
            f"of {format_bytes(peak.capacity_bytes)} on the fullest device",
        ),
    ]
    markup = (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{escape(more)}</div></div>'
        for name, value, more in tiles
    )
    return f'<div class="tiles">{"".join(markup)}</div>'


def _section(name: str, note: str, content: str) -> str:
    return f'<section><h2>{escape(name)}</h2><p class="note">{escape(note)}</p>{content}</section>'


def _figure(name: str, svg: str) -> str:
    kind = ' class="chart"' if name == "memory-timeline" else ""
    return f"<figure{kind}>{svg}</figure>"
