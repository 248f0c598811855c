"""The gradient of log^2 Z beside that of the loss."""

from pathlib import Path

import pytest
from torch import Tensor

import windlass
from command_line import TINY
from windlass.errors import RequestError

Z_LOSS = "train.z_loss=0.05"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"])
def test_a_run_with_it_equals_the_plain_loop_that_writes_it_out(home: Path, ranks: str) -> None:
    assert windlass.check(*TINY, f"data.source={home / 'text'}", "model.dropout=0", Z_LOSS, ranks)


def test_it_changes_the_weights_and_not_what_the_first_loss_is(home: Path) -> None:
    text = f"data.source={home / 'text'}"
    plain, with_it = (
        list(windlass.train(windlass.plan(*TINY, text, "train.steps=2", *words), root=home))
        for words in ((), (Z_LOSS,))
    )

    assert plain[0].loss == with_it[0].loss
    assert plain[0].gradient_norm != with_it[0].gradient_norm
    assert plain[1].loss != with_it[1].loss


def test_it_is_refused_beside_a_loss_of_ones_own_before_anything_is_captured() -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum() - targets.sum()

    with pytest.raises(RequestError, match=r"`train\.z_loss` = 0\.05 belongs to cross-entropy"):
        windlass.plan("gpt-tiny", Z_LOSS, loss=loss)
