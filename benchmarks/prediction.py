"""Accuracy of predicted step time and memory on this machine: keeps `windlass validate here`.

    python benchmarks/prediction.py

It first measures this machine again. It takes about 9 minutes, during which nothing else may run.
"""

import argparse
import json
import subprocess
import sys

from results import append_row


def windlass(*arguments: str) -> str:
    """The output of a `windlass` command; its progress stays visible."""
    return subprocess.run(
        [sys.executable, "-m", "windlass", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def keep(rows: list[dict[str, object]]) -> None:
    """Appends the rows of one sweep."""
    for row in rows:
        append_row("prediction", **row)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    windlass("probe")
    keep(json.loads(windlass("validate", "here", "--json")))
