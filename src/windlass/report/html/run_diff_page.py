"""What differs between runs, as one self-contained HTML page."""

from collections.abc import Iterable, Sequence
from html import escape

from windlass.judge import RunDiff
from windlass.report.figures.svg import PALETTE_CSS
from windlass.report.html.assets import PAGE_CSS
from windlass.report.run_differences import input_line, key_rows, result_rows

_LINE_COLOURS = {"+": "var(--green)", "-": "var(--red)", "@": "var(--blue)"}


def run_diff_page(found: RunDiff) -> str:
    """The HTML page; it has no script."""
    names = [run.short_id for run in found.runs]
    title = f"{names[-1]} beside {names[0]}" if len(names) == 2 else " beside ".join(names)
    runs = "".join(
        f"<p>{escape(run.short_id)}: {escape(run.name)}, {escape(run.model)} on "
        f"{escape(run.machine)}, {escape(run.state)}</p>"
        for run in found.runs
    )
    body = (
        f'<header><div class="brand">Windlass diff</div><h1>{escape(title)}</h1>'
        f"<p>{escape(input_line(found))}.</p>{runs}</header>"
        + _section("Inputs", _table(("input", "key", *names), key_rows(found)))
        + _section("Results", _table(("result", *names, "difference"), result_rows(found)))
        + (_section("Code", _code(found.code)) if found.code else "")
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} – Windlass</title>"
        f"<style>{PALETTE_CSS}{PAGE_CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = [
        "<tr>" + "".join(f'<td class="wide">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    ]
    if not lines:
        return '<p class="note">Nothing differs.</p>'
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _code(lines: Sequence[str]) -> str:
    shown = "\n".join(
        f'<span style="color:{_LINE_COLOURS.get(line[:1], "inherit")}">{escape(line)}</span>'
        for line in lines
    )
    return f"<pre>{shown}</pre>"
