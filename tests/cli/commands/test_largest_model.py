"""`windlass largest-model`, as a user runs it."""

import json
from pathlib import Path

import pytest

from command_line import Windlass
from windlass.schema.answers.largest_model import LargestModelRun

SMALL = ("model.layers=2", "model.width=256", "model.heads=4", "model.vocabulary=257",
         "data.tokenizer=byte", "compile=false", "precision=float32")  # fmt: skip
PADDING = 0.03
"""Share by which pages that are not full lift the bytes of layers this small."""


def test_one_step_in_phases_is_verified_and_its_run_is_kept_without_its_checkpoint(
    windlass: Windlass, tmp_path: Path
) -> None:
    done = windlass("largest-model", "gpt-tiny", *SMALL, "phases=3", "--folder", "run", "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["equal"]
    recorded = LargestModelRun.load(tmp_path / "run" / "largest_model.json")
    assert told["measured"] == recorded.model_dump(mode="json")
    assert recorded.phases == 3
    assert recorded.tokens == 2048
    for size in (recorded.offloaded_bytes, recorded.read_bytes, recorded.written_bytes):
        assert size.measured == pytest.approx(size.predicted, rel=PADDING)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "state").exists()
    shown = windlass("show", "run")
    assert shown.returncode == 0
    assert "read a step" in shown.stdout


def test_the_result_is_one_table_with_the_transfers_and_the_verdict(
    windlass: Windlass, tmp_path: Path
) -> None:
    done = windlass("largest-model", "gpt-tiny", *SMALL, "phases=2", "--folder", "run",
                    "--keep-checkpoint")  # fmt: skip

    assert done.returncode == 0, done.stderr
    for words in ("device memory peak", "offloaded, on disk", "written", "MFU",
                  "bytes in device memory", "take as long as compute", "equal to the reference",
                  "gradient of layer 0", "gradient of layer 3"):  # fmt: skip
        assert words in done.stdout
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_too_few_tokens_and_another_machine_are_refused(refused: Windlass) -> None:
    few = refused("largest-model", "gpt-tiny", *SMALL, "train.batch=4")
    other = refused("largest-model", "gpt-tiny", "--on", "a100-80gb")

    assert few.returncode == other.returncode == 2
    assert (
        "makes 1024 tokens a step; the largest model is measured with at least 2048" in few.stderr
    )
    assert "measured on `here`" in other.stderr
