"""Runs the real command line, each in a process of its own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TINY = (
    "gpt-tiny", "model.layers=1", "model.width=32", "model.heads=2", "model.vocabulary=257",
    "data.tokenizer=byte", "train.sequence=32", "train.batch=4", "train.evaluate_sequences=4",
    "precision=float32", "compile=false", "batch.micro=2", "model.dropout=0.1",
)  # fmt: skip
"""A model that trains a step in milliseconds, with accumulation and dropout on."""

Windlass = Callable[..., subprocess.CompletedProcess[str]]


def start(surroundings: dict[str, str], folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts a command line that the test will stop or kill."""
    return subprocess.Popen(
        (sys.executable, "-m", "windlass", *words),
        cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
