"""Converts an SVG file to PNG with a headless browser."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from windlass.atomic_files import atomic_write
from windlass.errors import StorageError

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
