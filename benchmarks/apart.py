"""Runs a benchmark's own script again in a process of its own, for one row of figures."""

import json
import subprocess
import sys


def apart(script: str, *words: object) -> dict[str, float | str]:
    """What `script --child WORDS` prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, script, "--child", *map(str, words)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])
