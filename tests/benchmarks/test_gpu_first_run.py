"""The first run on a GPU: its parts have limits, and whatever they do there is one report."""

import getpass
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_first_run import ROOT, Outcome, Part, gpu_tests, report_text, run_parts

SCRIPT = ROOT / "scripts" / "gpu-first-run.sh"


def part(name: str, code: str, share: float) -> Part:
    return Part(name, (sys.executable, "-c", code), share)


def run_script(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        ["bash", SCRIPT, *words], capture_output=True, text=True, env=environment, timeout=timeout,
        check=False,
    )  # fmt: skip


def test_a_part_that_hangs_or_fails_stops_no_other_and_keeps_what_it_printed(tmp_path: Path):
    hanging = "import time; print('begun', flush=True); time.sleep(60)"
    outcomes = run_parts(
        [
            part("hangs", hanging, 0.05),
            part("fails", "print('half'); raise SystemExit(3)", 1.0),
            part("works", "print('result: | 1 |'); print('whole')", 1.0),
        ],
        20.0,
    )
    assert [outcome.words for outcome in outcomes] == [
        "ended at its limit of 1 s", "failed with exit code 3", "ok",
    ]  # fmt: skip
    text = report_text(outcomes, tmp_path, dry=True)
    for said in ("begun", "half", "whole", "\n| 1 |\n", "| hangs | ended at its limit of 1 s |"):
        assert said in text


def test_a_report_names_no_path_user_or_host_of_its_machine(tmp_path: Path):
    secret = f"{ROOT}/src {Path.home()}/x {getpass.getuser()} on {socket.gethostname()}"
    text = report_text([Outcome("system", "ok", 1.0, 2.0, secret)], tmp_path, dry=False)
    said = next(line for line in text.splitlines() if line.startswith("./src"))
    assert str(ROOT) not in text
    assert not re.search(rf"\b{getpass.getuser()}\b", said)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", said)


def test_the_tests_of_a_gpu_are_all_files_that_mark_some():
    assert "tests/gpu/test_training_laws.py" in gpu_tests()
    assert "tests/hardware/probe/test_probe.py" in gpu_tests()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_script_names_the_dry_run(tmp_path: Path):
    done = run_script("--out", str(tmp_path / "report.md"), timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "torch finds no GPU here; `--dry-run` walks the same parts on the CPU"
    )
    assert not (tmp_path / "report.md").exists()


@pytest.mark.slow
def test_a_dry_run_walks_all_parts_on_the_cpu(tmp_path: Path):
    report = tmp_path / "report.md"
    done = run_script("--dry-run", "--seconds", "1800", "--out", str(report), timeout=1900)
    text = report.read_text()
    assert done.returncode == 0, text[-3000:]
    for name in ("system", "doctor", "tests", "train", "phases"):
        assert f"| {name} | ok |" in text
    assert re.search(r"\| windlass \| [\d.]+ ms", text)
    assert re.search(r"\| windlass,phases=2 \| [\d.]+ ms", text)
    assert "## windlass-doctor.toml" in text
