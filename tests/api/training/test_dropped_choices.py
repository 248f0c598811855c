"""What experts with a capacity drop is the same under every plan, and is in the record."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY

PLANS = {
    "micro-batches": ("batch.micro=1",),
    "divided experts": ("parallel.data=2", "parallel.expert=2"),
    "stages with recompute": ("parallel.pipeline=2", "recompute=full"),
    "divided sequences": ("parallel.context=2",),
}


def dropped_shares(home: Path, *words: str) -> list[float | None]:
    run = windlass.train(
        "moe-tiny", *TINY[1:], "model.layers=2", "model.experts=4", "model.kv_heads=1",
        "model.capacity=0.8", "train.steps=2", "train.learning_rate=1e-9",
        f"data.source={home / 'text'}", *words, root=home / "runs",
    )  # fmt: skip
    list(run)
    return [step.dropped_share for step in windlass.load(run.folder).steps]


@pytest.mark.slow
def test_every_plan_drops_as_many_choices_as_one_device(home: Path):
    alone = dropped_shares(home)
    assert all(share is not None and 0.2 <= share < 1 for share in alone)
    for words in PLANS.values():
        assert dropped_shares(home, *words) == alone
