"""Promises of the two commands for a fresh machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(target: str) -> str:
    """What make would run for a target on a fresh machine."""
    return subprocess.run(
        ("make", "--dry-run", "--always-make", "--no-print-directory", target),
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_training_installs_what_runs_need_and_no_more():
    made = commands("train")
    assert "--editable ." in made
    assert "[test]" not in made


@pytest.mark.parametrize("target", ["test", "types", "site", "test-slow", "format"])
def test_whatever_tests_sets_itself_up(target: str):
    made = commands(target)
    assert made.index("-m venv") < made.index('--editable ".[test]"')
