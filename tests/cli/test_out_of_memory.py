"""A run that runs out of memory says what would fit, and can be resumed."""

import re
import sys
from pathlib import Path

import pytest

from command_line import TINY, Windlass
from windlass.tracking.run_reader import load_run
from windlass.units import parse_bytes

WIDE = (*TINY[:1], "model.layers=4", "model.width=64", *TINY[3:6], "train.sequence=256",
        "train.batch=64", "batch.micro=64", "train.evaluate_sequences=1", *TINY[9:11],
        "train.steps=2", "train.save_every=1")  # fmt: skip
"""Little compute, and hundreds of MiB of activations."""
EXTRA_BYTES = 2**28
"""Memory beyond what the libraries take: less than half of what the run needs, and more than it
allocates before its first step."""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit mapped memory")
def test_running_out_of_memory_names_three_plans_that_fit_and_the_run_can_be_resumed(
    windlass: Windlass, tmp_path: Path
) -> None:
    done = windlass("train", *WIDE, "--folder", "run", more_bytes=EXTRA_BYTES)

    assert done.returncode == 2, done.stderr
    assert "memory ran out in step 1" in done.stderr
    assert "no checkpoint was written yet" in done.stderr
    assert "Traceback" not in done.stderr
    plans = re.findall(
        r"- `memory=(\w+) (.+?)` makes it fit with a predicted peak of (.+?),", done.stderr
    )
    assert len(plans) == 3, done.stderr
    assert any("phases=" in words for _, words, _ in plans)
    for memory, _, peak in plans:
        assert parse_bytes(peak) <= parse_bytes(memory) * 1.005
    assert load_run(tmp_path / "run").state == "broken"
    resumed = windlass("resume", "run", "--runs", ".")
    assert resumed.returncode == 0, resumed.stderr
    assert load_run(tmp_path / "run").state == "finished"
