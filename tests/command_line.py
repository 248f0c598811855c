"""Runs the real command line, in a process of its own or in this one."""

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from windlass.cli import console as output
from windlass.cli.main import main

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


def run_here(
    words: tuple[str, ...], surroundings: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a command line in this process, and in a folder."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.chdir(folder)
        for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
            patch.setenv(name, surroundings[name])
        for console in (output.console, output.error_console):
            patch.setattr(console, "_width", int(surroundings["COLUMNS"]))
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())
