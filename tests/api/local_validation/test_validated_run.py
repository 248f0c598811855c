"""Rows of `validate here` are kept as they end."""

from pathlib import Path

import pytest

from factories import tiny_machine
from windlass.hardware import save_local_machine
from windlass.hardware.local_machine import system_fingerprint
from windlass.verify.local_validation.draw import draw_runs
from windlass.verify.local_validation.validated_run import (
    ValidatedRun,
    validate_random_plans,
    validated_runs_file,
)


def test_rows_that_were_kept_are_not_run_again_also_after_a_kill_tore_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = tiny_machine().model_copy(update={"system": system_fingerprint()})
    save_local_machine(tmp_path / "windlass", machine)
    rows = [
        ValidatedRun(
            number=run.number, sort=run.sort, model=run.model, overrides=run.overrides,
            problem="it was cut",
        )
        for run in draw_runs(3, 8)
    ]  # fmt: skip
    path = validated_runs_file(8)
    path.parent.mkdir(parents=True)
    lines = [row.to_json() for row in rows]
    path.write_text("\n".join([*lines, lines[0][: len(lines[0]) // 2]]), encoding="utf-8")

    assert list(validate_random_plans(3, 8, pytest.fail)) == rows
