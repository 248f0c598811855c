"""How well step time and memory are predicted: keeps the rows of `windlass validate here`.

    python benchmarks/prediction.py

Measures this machine anew first. Takes about 9 minutes, in which nothing else may run.
"""

import json
import subprocess
import sys

from results import append_row


def windlass(*words: str) -> str:
    """What the command prints; its progress stays visible."""
    return subprocess.run(
        [sys.executable, "-m", "windlass", *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def keep(rows: list[dict[str, object]]) -> None:
    """Appends the rows of one sweep."""
    for row in rows:
        append_row("prediction", **row)


if __name__ == "__main__":
    windlass("probe")
    keep(json.loads(windlass("validate", "here", "--json")))
