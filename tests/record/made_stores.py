"""Small stores of runs for the tests of the record."""

from collections.abc import Mapping
from pathlib import Path

from windlass.schema.run_record import Step
from windlass.tracking.run_folder import RunFolder, create_run_folder

PLAN = """\
precision = "bfloat16"
compile = true

[model]
name = "gpt-tiny"

[[stages]]
phases = [[0, 3], [3, 6]]
"""
REQUEST = """\
[train]
learning_rate = {learning_rate}
optimizer = "{optimizer}"
"""


def make_run(
    root: Path,
    model: str = "gpt-tiny",
    *,
    losses: tuple[float, ...] = (3.0, 2.0, 1.0),
    seconds: float = 0.5,
    learning_rate: float = 1e-3,
    optimizer: str = "adamw",
    meta: Mapping[str, object] = {},
    folder: Path | None = None,
) -> RunFolder:
    """A run with one step for each loss, which still has its folder locked."""
    meta = {
        "model": model, "machine": "here", "steps": 100, "predicted_seconds": 0.4,
        "predicted_interval": [0.3, 0.5], **meta,
    }  # fmt: skip
    run = create_run_folder(root, model, documents={}, meta=meta, folder=folder)
    (run.path / "plan.toml").write_text(PLAN)
    (run.path / "request.toml").write_text(
        REQUEST.format(learning_rate=learning_rate, optimizer=optimizer)
    )
    for number, loss in enumerate(losses, start=1):
        run.append_step(make_step(number, loss, seconds))
    return run


def make_step(number: int, loss: float, seconds: float = 0.5) -> Step:
    """One step of 512 tokens."""
    return Step(
        step=number, loss=loss, gradient_norm=1.0, learning_rate=1e-3, tokens=512,
        seconds=seconds, memory_bytes=2**30, by_kind={"forward": 0.2, "backward": 0.3},
        held_out_loss=5.0 if number % 5 == 0 else None,
    )  # fmt: skip
