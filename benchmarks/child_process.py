"""Runs a benchmark's own script in a child process, for one row of figures."""

import json
import subprocess
import sys


def run_child(script: str, *arguments: object) -> dict[str, float | str]:
    """The JSON object that `script --child ARGUMENTS` prints last."""
    result = subprocess.run(
        [sys.executable, script, "--child", *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])
