"""A rank of the torch stack that hangs is named within the time of the watchdog."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.rank_processes import RUN, SHORT_TIMEOUT, wait_for_ranks, wait_for_step
from command_line import TINY
from windlass.tracking.run_reader import load_run

STUCK = """
import time
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 24 and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(3600)
        return x + self.linear(x).relu()

def stuck():
    return nn.Sequential(nn.Embedding(300, 32), Block(), Block(), nn.Linear(32, 300))
"""
_SECONDS = 10
"""What a first step of a busy machine takes less than."""
SHARDS = ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2")


def start(folder: Path, surroundings: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "windlass", "train", *words, "--stack", "torch"]
    return subprocess.Popen(
        [*command, "--folder", "run"], cwd=folder, env=surroundings, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_never_joins_a_collective_is_named_with_the_collective(
    tmp_path: Path, surroundings: dict[str, str]
) -> None:
    (tmp_path / "own.py").write_text(STUCK)
    words = (
        "train.sequence=32", "train.batch=8", "batch.micro=2", "data.tokenizer=byte",
        "data.limit_bytes=300000", "compile=false", f"train.hang_timeout_seconds={_SECONDS}",
    )  # fmt: skip
    process = start(tmp_path, surroundings, "own.py:stuck", *words, *RUN[len(TINY) :], *SHARDS)
    _, told = process.communicate(timeout=180)
    assert process.returncode == 1, told
    assert "rank 1 (pipeline stage 0, tensor-parallel rank 0, data-parallel rank 1) in step" in told
    assert f"hangs: no progress for {_SECONDS} s on any rank" in told
    assert "it never joined `gloo:" in told
    assert "in which rank 0 waits" in told
    assert load_run(tmp_path / "run").state == "broken"


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SHARDS, ("parallel.pipeline=2",)], ids=["shards", "stages"])
def test_a_rank_that_a_signal_has_stopped_is_named(
    tmp_path: Path, surroundings: dict[str, str], plan: tuple[str, ...]
) -> None:
    process = start(tmp_path, surroundings, *RUN, *SHORT_TIMEOUT, *plan)
    ranks = wait_for_ranks(process.pid)
    wait_for_step(tmp_path / "run", 7)
    os.kill(ranks[1], signal.SIGSTOP)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1, told
    assert "rank 1 (" in told
    assert "is stopped (by a signal; SIGCONT resumes it)" in told
