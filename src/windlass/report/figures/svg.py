"""Building blocks of SVG figures: escaped elements, axis ticks and units, colours.

Colours are those of Okabe & Ito (2008), which colour-blind readers can tell apart. They are CSS
variables, so that one drawing serves light and dark pages.
"""

import math
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import atomic_write
from windlass.errors import StorageError

_MARGIN, _HEAD = 24, 74
_LETTER_SHARE = 0.56
"""Mean width of a letter of a sans-serif font over the font size."""

PALETTE_CSS = """
:root{--ink:#1d2733;--soft:#5b6878;--line:#dfe4ea;--back:#fbfcfd;--card:#fff;--grid:#e9edf1;
--blue:#0072b2;--sky:#56b4e9;--green:#009e73;--orange:#e69f00;--red:#d55e00;--pink:#cc79a7;
--yellow:#c9b400;--violet:#7b61b8;--brown:#8c6239;--grey:#9aa5b1;--wash:#0072b21c}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9ef;--soft:#9aa7b6;--line:#2b3541;--back:#11161c;
--card:#181f27;--grid:#252e38;--blue:#4aa8e0;--sky:#8fcdf2;--green:#2bbf95;--orange:#f0b23a;
--red:#f07d3a;--pink:#dd9bc2;--yellow:#e6d84a;--violet:#a994e0;--brown:#bf9266;--grey:#6d7885;
--wash:#4aa8e026}}
"""

SVG_CSS = """
svg{display:block;width:100%;height:auto;font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
svg text{fill:var(--soft)}svg text.strong{fill:var(--ink)}svg .grid{stroke:var(--grid)}
svg .axis{stroke:var(--line)}svg .moving rect{vector-effect:non-scaling-stroke}
"""

_KIND_COLOURS = {
    "load_batch": "grey", "prefetch_weights": "sky", "free_weights": "sky", "free_shard": "sky",
    "unshard_weights": "yellow", "all_gather_params": "yellow", "forward": "blue",
    "recompute": "orange", "backward": "red", "backward_input": "red", "backward_weight": "orange",
    "send": "violet", "receive": "violet", "send_tied_weights": "violet",
    "recv_tied_weights": "violet", "send_tied_grads": "violet", "accumulate_tied_grads": "violet",
    "reduce_grads": "yellow", "offload_activation": "brown", "reload_activation": "brown",
    "offload_grads": "brown", "grad_norm": "pink", "update": "green", "sync": "grey",
}  # fmt: skip


STAGE_COLOURS = ("blue", "orange", "green", "pink", "violet", "red", "brown", "sky")
"""Colours of pipeline stages, used in turn."""


class AxisUnit(NamedTuple):
    """The unit of an axis: a value is shown as `value / scale`."""

    scale: float
    name: str


UNITLESS = AxisUnit(1.0, "")


def kind_colour(kind: str) -> str:
    """The CSS colour of an instruction kind."""
    return f"var(--{_KIND_COLOURS.get(kind, 'grey')})"


def power_unit(largest: float) -> AxisUnit:
    """A power of ten, `1e-03`, of which `largest` is at most ten."""
    if not 0 < largest < math.inf:
        return UNITLESS
    power = math.floor(math.log10(largest))
    return AxisUnit(10.0**power, f"1e{power:+03d}") if power else UNITLESS


def seconds_unit(largest: float) -> AxisUnit:
    """The unit of an axis that reaches `largest` seconds."""
    units = (
        AxisUnit(3600, "h"),
        AxisUnit(60, "min"),
        AxisUnit(1, "s"),
        AxisUnit(1e-3, "ms"),
        AxisUnit(1e-6, "µs"),
    )
    return next((unit for unit in units if largest >= 2 * unit.scale), units[-1])


def bytes_unit(largest: float) -> AxisUnit:
    """The unit of an axis that reaches `largest` bytes."""
    units = (
        AxisUnit(2**40, "TiB"),
        AxisUnit(2**30, "GiB"),
        AxisUnit(2**20, "MiB"),
        AxisUnit(2**10, "KiB"),
    )
    return next((unit for unit in units if largest >= unit.scale), AxisUnit(1, "B"))


def ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Round numbers between `low` and `high`: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        return (low,)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.7)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """An SVG element with escaped attributes; `content` is markup that is escaped already.

    Args:
        **attributes: an underscore becomes a dash; one at the end is dropped (`class_`).
    """
    markup = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{markup}>{content}</{tag}>" if content else f"<{tag}{markup}/>"


def text_label(x: float, y: float, text: str, **attributes: str | float) -> str:
    """A text element."""
    return element("text", escape(text), x=x, y=y, **attributes)


def tooltip(text: str) -> str:
    """The text that a browser shows while the pointer rests on the enclosing element."""
    return element("title", escape(text))


def text_width(text: str, size: float = 12) -> float:
    """Estimated width of a text in pixels."""
    return len(text) * size * _LETTER_SHARE


def legend(entries: Sequence[tuple[str, str]], x: float, y: float) -> str:
    """One line of names with colour swatches, from `x` to the right."""
    parts = []
    for name, colour in entries:
        style = f"fill:{colour}"
        parts.append(element("rect", x=x, y=y - 9, width=10, height=10, rx=2, style=style))
        parts.append(text_label(x + 15, y, name))
        x += legend_width([(name, colour)])
    return "".join(parts)


def legend_width(entries: Sequence[tuple[str, str]]) -> float:
    """Estimated width of a legend in pixels."""
    return sum(15 + text_width(name) + 18 for name, _ in entries)


def svg_document(content: str, width: float, height: float, name: str) -> str:
    """An SVG element that scales with the page."""
    return element(
        "svg", content, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:g} {height:g}",
        role="img", aria_label=name,
    )  # fmt: skip


def svg_size(svg: str) -> tuple[float, float]:
    """Width and height of a drawing's coordinate system."""
    size = svg.partition('viewBox="')[2].partition('"')[0].split()
    return float(size[2]), float(size[3])


def with_heading(svg: str, heading: str, subtitle: str) -> str:
    """A drawing as a standalone SVG file with a heading and a subtitle."""
    width, height = svg_size(svg)
    inside = svg.partition(">")[2].removesuffix("</svg>")
    parts = (
        text_label(0, 26, heading, class_="strong", style="font-size:22px;font-weight:600"),
        text_label(0, 50, subtitle),
        element("g", inside, transform=f"translate(0 {_HEAD})"),
    )
    content = element("g", "".join(parts), transform=f"translate({_MARGIN} {_MARGIN})")
    size = (width + 2 * _MARGIN, height + _HEAD + 2 * _MARGIN)
    return standalone(svg_document(content, *size, heading))


def standalone(svg: str) -> str:
    """A drawing as a standalone SVG file, with colours and background included."""
    style = PALETTE_CSS.replace(":root", "svg") + SVG_CSS.replace("svg .", ".").replace(
        "svg t", "t"
    )
    background = element("rect", width="100%", height="100%", style="fill:var(--card)")
    head, _, rest = svg.partition(">")
    return f"{head}>{element('style', escape(style, quote=False))}{background}{rest}"


def _text(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}"


_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")
_SECONDS = 120.0


def write_png(svg: str, path: Path, *, width: int, height: int, scale: float = 1.5) -> None:
    """Writes a drawing as PNG.

    Args:
        scale: pixels per unit of the drawing.

    Raises:
        StorageError: no browser is found, or the browser writes nothing.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise StorageError(
            f"no browser to draw `{path.name}` ({', '.join(_BROWSERS[:3])} are not installed); "
            f"install one, or write `{path.with_suffix('.svg').name}` or `{path.stem}.html`"
        )
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "page.png"
        style = "html,body{margin:0}svg{display:block}"
        page.write_text(f"<!DOCTYPE html><meta charset=utf-8><style>{style}</style>{svg}")
        command = (
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", f"--force-device-scale-factor={scale:g}",
            f"--window-size={width},{height}", f"--screenshot={shot}", page.as_uri(),
        )  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)  # noqa: S603, PLW1510
        except subprocess.TimeoutExpired:
            raise StorageError(f"`{browser}` did not draw `{path}` within {_SECONDS:g} s") from None
        if not shot.exists():
            output = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise StorageError(f"`{browser}` drew no `{path}`: {output[0]}")
        atomic_write(path, shot.read_bytes())
