"""`windlass judge`: what it prints, and its exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

from windlass.cli.main import main
from windlass.schema import Step
from windlass.tracking import create_run_folder


def make_run(root: Path, *, factor: float = 1.0) -> Path:
    """A run of 160 steps without peers, which take `factor` times as long from step 81 on."""
    rng = np.random.default_rng(0)
    with create_run_folder(root, "gpt-tiny", documents={}, meta={"model": "gpt-tiny"}) as run:
        for number in range(1, 161):
            seconds = 0.1 * np.exp(rng.normal(0, 0.02)) * (factor if number > 80 else 1)
            run.append_step(
                Step(
                    step=number, loss=4 + rng.normal(0, 0.01), gradient_norm=1.0,
                    learning_rate=1e-3, tokens=512, seconds=seconds, memory_bytes=2**30,
                    by_kind={"forward": seconds},
                )
            )  # fmt: skip
        run.end("finished")
        return run.path


def test_a_run_without_peers_is_unknown_with_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_run(tmp_path)
    main(["judge", "last", "--runs", str(tmp_path)])
    assert capsys.readouterr().out.startswith("unknown: no peers")


def test_a_slow_run_has_exit_code_1_and_is_told_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path, factor=1.5)
    with pytest.raises(SystemExit) as ended:
        main(["judge", str(run), "--runs", str(tmp_path), "--json"])
    assert ended.value.code == 1
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["level"], verdict["kind"]) == ("slow", "forward")
    assert abs(verdict["since_step"] - 81) <= 2


def test_a_bad_alert_is_refused_before_anything_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["judge", "last", "--runs", str(tmp_path), "--alert", "say 'hello"])
    assert ended.value.code == 2
    assert "no command" in capsys.readouterr().err
