"""Renders rich tables to plain text, as a terminal of a given width shows them."""

from io import StringIO

from rich.console import Console, RenderableType


def render(content: RenderableType, width: int = 80) -> str:
    """The text of a table in a terminal of `width` columns, without colours."""
    console = Console(width=width, file=StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(content)
    return capture.get()
