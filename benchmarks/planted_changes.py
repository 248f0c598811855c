"""Plants one difference between two runs, a pair, and none, and counts how `bisect` finds them.

    python benchmarks/planted_changes.py [CASE ...] [--keep FOLDER]

Each case trains a good and a bad run of a tiny model in folders of their own; the bad run also has
two innocent changes, so that there is something to search. A table says what was planted, what was
named and how many short runs it took; rows go to results/planted_changes.csv. It takes about
15 minutes on two cores.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from results import append_row
from windlass import bisect

BASE = (
    "train.steps=60", "train.batch=4", "train.sequence=64", "model.layers=2", "model.width=128",
    "model.heads=4", "train.learning_rate=0.002",
)  # fmt: skip
INNOCENT = ("train.seed=1", "train.evaluate_every=30")
MOST_RERUNS = 8
MODEL = """
import os

import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * SCALE

def build():
    return nn.Sequential(nn.Embedding(4096, 64), Block(), Block(), nn.Linear(64, 4096))

SCALE = 1.0
"""


@dataclass(frozen=True)
class Case:
    """One planted difference."""

    planted: tuple[str, ...]
    """What `bisect` should name."""
    bad: tuple[str, ...]
    """Overrides of the bad run."""
    metric: str | None = None
    good: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "learning rate": Case(("train.learning_rate",), ("train.learning_rate=0.3",), "loss"),
    "batch": Case(("train.batch",), ("train.batch=32",), "seconds"),
    "sequence": Case(("train.sequence",), ("train.sequence=8",), "loss"),
    "width": Case(("model.width",), ("model.width=512",), "seconds"),
    "recompute": Case(
        ("recompute",), ("recompute=full", "train.batch=16"), "seconds", ("train.batch=16",)
    ),
    "data": Case(("data.source",), (), "loss"),
    "threads": Case(
        ("variable OMP_NUM_THREADS",), ("train.batch=16", "train.sequence=256"), "seconds",
        ("train.batch=16", "train.sequence=256"), {"OMP_NUM_THREADS": "1"},
    ),
    "beta": Case(("train.betas",), ("train.betas=0.9,0.1",), "loss"),
    "code": Case(("code",), (), "loss"),
    "pair": Case(("code", "variable OMP_NUM_THREADS"), (), "loss"),
    "nothing": Case((), (), "loss"),
}  # fmt: skip


def train(root: Path, *words: str, variables: Mapping[str, str] | None = None) -> str:
    """Trains a run under `root` and returns its folder's name."""
    before = set(root.glob("*/id"))
    subprocess.run(
        [sys.executable, "-m", "windlass", "train", *words, "--runs", str(root)],
        check=True, cwd=root.parent, capture_output=True, env=os.environ | dict(variables or {}),
    )  # fmt: skip
    (new,) = set(root.glob("*/id")) - before
    return new.parent.name


def write_text(folder: Path, line: str) -> Path:
    """A folder of text to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"{line} {index}\n" * 400)
    return folder


def git(folder: Path, *words: str) -> None:
    """Runs git in a folder, as an author of no account."""
    subprocess.run(
        ["git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", *words],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def code_runs(root: Path, *, pair: bool) -> tuple[str, str]:
    """A good and a bad run of a model file with five commits between them, the fourth one bad.

    In a pair, that commit is bad only if an environment variable has a value, too.
    """
    project = root.parent
    git(project, "init", "-q")
    (project / ".gitignore").write_text("runs\n")
    bad_scale = "60.0 if os.environ.get('OMP_NUM_THREADS') == '1' else 1.0" if pair else "60.0"
    names = []
    for number in range(5):
        scale = "1.0" if number < 3 else bad_scale
        text = MODEL.replace("SCALE = 1.0", f"SCALE = {scale}")
        (project / "model.py").write_text(f"{text}VERSION = {number}\n")
        git(project, "add", "model.py", ".gitignore")
        git(project, "commit", "-qm", f"version {number}")
        if number in (0, 4):
            variables = {"OMP_NUM_THREADS": "1" if pair and number else "2"}
            words = ("train.steps=40", "train.batch=4", "train.sequence=64")
            names.append(train(root, "model.py:build", *words, variables=variables))
    return names[0], names[1]


def run_case(name: str, folder: Path) -> bool:
    """Plants one case, bisects it, prints a line and appends a row."""
    case = CASES[name]
    root = folder / "runs"
    root.mkdir(parents=True)
    innocent = INNOCENT if name not in ("code", "pair") else ()
    os.chdir(folder)
    if name in ("code", "pair"):
        good, bad = code_runs(root, pair=name == "pair")
    else:
        data: tuple[str, ...] = ()
        if name == "data":
            data = (f"data.source={write_text(folder / 'one', 'the same line again')}",)
        good = train(root, "gpt-tiny", *BASE, *case.good)
        bad = train(root, "gpt-tiny", *BASE, *case.bad, *innocent, *data, variables=case.variables)
    found = bisect(good, bad, metric=case.metric, root=root)
    right = set(found.culprits) == set(case.planted)
    few = found.reruns <= MOST_RERUNS
    print(
        f"{name:14} planted {', '.join(case.planted) or '-':44} named "
        f"{', '.join(found.culprits) or '-':44} {found.reruns} short runs  "
        f"{'right' if right and few else 'WRONG'}\n{'':14} {found.verdict}",
        flush=True,
    )
    append_row(
        "planted_changes",
        case=name, planted=" ".join(case.planted), named=" ".join(found.culprits),
        factors=len(found.factors), reruns=found.reruns, right=right and few,
    )  # fmt: skip
    return right and few


def main() -> None:
    """Runs the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    base = options.keep or Path(tempfile.mkdtemp(prefix="bisect"))
    right = sum(run_case(name, base / name.replace(" ", "-")) for name in options.cases)
    print(f"{right} of {len(options.cases)} right")
    if options.keep is None:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
