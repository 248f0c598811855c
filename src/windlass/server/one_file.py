"""The files of the page, and any view of it as one HTML file that needs nothing else."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources

from windlass.report import PALETTE_CSS

MEDIA_TYPES = {
    ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain",
}  # fmt: skip
"""By suffix of the files of the page."""
MODULES = (
    "dom.js", "formats.js", "client.js", "chart.js", "bars.js", "lanes.js", "curves.js",
    "runs_view.js", "run_view.js", "compare_view.js", "diff_view.js", "app.js",
)  # fmt: skip
"""The page's modules; each imports only from those before it."""
_CHARTS, _CHARTS_CSS = "uPlot.iife.min.js", "uPlot.min.css"
_PALETTE = "palette.css"
_FILES = frozenset({"index.html", "app.css", _CHARTS, _CHARTS_CSS, "uPlot.LICENSE.txt", *MODULES})
_IMPORT = re.compile(r"^import\s[^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@cache
def static_file(name: str) -> str | None:
    """One of the files of the page; None if it has none of this name."""
    if name == _PALETTE:  # the colours of all other pages and figures
        return PALETTE_CSS
    if name not in _FILES:
        return None
    return (resources.files("windlass.server") / "static" / name).read_text(encoding="utf-8")


def one_file(view: str, answers: Mapping[str, object]) -> str:
    """A view as a self-contained HTML file; nothing is fetched, and only its own script runs.

    Args:
        view: the state of the page, as in its address behind `#`.
        answers: what the API answers to each path that the view asks for.
    """
    script = f'"use strict";{_text(_CHARTS)}\n(() => {{\n{_bundle()}}})();'
    style = "".join(_text(name) for name in (_PALETTE, _CHARTS_CSS, "app.css"))
    # JSON in a script element is no script; `<` could end the element.
    data = json.dumps({"view": view, "answers": answers}).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>Windlass</title><style>{style}</style></head><body>"
        f'<script type="application/json" id="saved">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


@cache
def _bundle() -> str:
    """All modules as one script, without what they import and export."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _text(name))) for name in MODULES)


def _text(name: str) -> str:
    return static_file(name) or ""


def _source(text: str) -> str:
    """What a policy calls an inline script or style that has exactly this text."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
