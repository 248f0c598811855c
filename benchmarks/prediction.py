"""Accuracy of predicted step time and memory here: keeps `windlass validate here --random`.

    python benchmarks/prediction.py 201 202 203

It first measures this machine again (50 s). Each seed takes about 15 minutes, during which nothing
else may run; started again with `--keep-probe`, it goes on with the rest. Each row is printed as it
ends and kept in the user's cache; once all of a seed have ended, they are appended to
`results/random_prediction.csv`. `windlass validate here --random 40 --seed 201` then prints their
table at once.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from results import append_row
from windlass.api import Measurement


def windlass(*arguments: str) -> str:
    """The output of a `windlass` command; its progress stays visible."""
    return subprocess.run(
        [sys.executable, "-m", "windlass", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def keep(seed: int, rows: list[dict[str, Any]]) -> None:
    """Appends the rows of one seed: what was drawn, and what was measured or why it was not."""
    for row in rows:
        measurement = row.pop("measurement") or dict.fromkeys(Measurement.model_fields)
        append_row("random_prediction", seed=seed, **{**row, **measurement})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--random", type=int, default=40, help="plans of each seed")
    parser.add_argument("--keep-probe", action="store_true", help="do not measure the machine anew")
    options = parser.parse_args()
    if not options.keep_probe:
        windlass("probe")
    for seed in options.seeds:
        count = str(options.random)
        rows = windlass("validate", "here", "--random", count, "--seed", str(seed), "--json")
        keep(seed, json.loads(rows))
