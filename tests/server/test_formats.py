"""The page writes quantities as the command line does."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from windlass.server.app import static_file
from windlass.units import format_bytes, format_count, format_seconds

NODE = shutil.which("node")
SECONDS = (
    0.0, 3e-12, 8e-9, 4.2e-5, 0.0999, 0.41, 0.99999, 1.5, 59.4, 61, 3599.9, 3600, 86399, 86400,
    2 * 86400 - 1, 5.5 * 86400, 1e9,
)  # fmt: skip
BYTES = (0, 1, 1023, 1024, 1536, 2**20 - 1, 2**20, 5 * 2**30, 2**40 - 1, 3 * 2**50)
COUNTS = (0, 7, 999, 1000, 1234, 999_499, 999_999, 124_439_808, 1.75e11, 3e12)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_seconds_bytes_and_counts_read_as_on_the_command_line(tmp_path: Path) -> None:
    assert NODE is not None
    (tmp_path / "formats.mjs").write_text(static_file("formats.js") or "")
    asked = json.dumps([["Seconds", SECONDS], ["Bytes", BYTES], ["Count", COUNTS]])
    (tmp_path / "ask.mjs").write_text(
        f"import * as formats from './formats.mjs';\nconst asked = {asked};\n"
        "console.log(JSON.stringify(asked.map(([name, values]) =>"
        " values.map(value => formats[`format${name}`](value)))));\n"
    )
    told = subprocess.run([NODE, "ask.mjs"], cwd=tmp_path, capture_output=True, check=True).stdout
    expected = [
        [format_seconds(value).replace("us", "µs") for value in SECONDS],
        [format_bytes(value) for value in BYTES],
        [format_count(value) for value in COUNTS],
    ]
    assert json.loads(told) == expected
