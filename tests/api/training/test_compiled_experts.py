"""Compiled layers with experts, whole on one device or divided over ranks, train as eager ones."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY

ROUNDING = 1e-5
"""Relative: float32 sums that a compiler brings into another order."""
PLANS = {
    "one device": (),
    "divided experts": ("parallel.data=2", "parallel.expert=2", "model.capacity=1.0"),
    "shards of experts": ("parallel.tensor=2", "model.expert_ffn=44"),
}


def losses(home: Path, *words: str) -> list[float]:
    run = windlass.train(
        "moe-tiny", *TINY[1:], "model.experts=4", "model.kv_heads=2", "train.steps=3",
        "train.epsilon=1e-4", f"data.source={home / 'text'}", *words, root=home / "runs",
    )  # fmt: skip
    list(run)
    steps = windlass.load(run.folder).steps
    return [*(step.loss for step in steps), steps[-1].held_out_loss or 0.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("plan", PLANS)
def test_compiled_experts_train_as_eager_ones(home: Path, plan: str):
    eager = losses(home, *PLANS[plan])
    compiled = losses(home, *PLANS[plan], "compile=true")
    assert compiled == pytest.approx(eager, rel=ROUNDING)
