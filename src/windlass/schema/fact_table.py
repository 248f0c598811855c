"""What a notebook shows of a value: a heading and a table of facts."""

from collections.abc import Mapping
from html import escape


def fact_table_html(heading: str, facts: Mapping[str, str]) -> str:
    """An HTML table with a fact in each row, everything escaped."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<div><b>{escape(heading)}</b><table>{rows}</table></div>"
