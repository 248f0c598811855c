"""Experts by dial."""

import pytest

from windlass.errors import ModelError
from windlass.models.catalog import apply_model_arguments, model_config
from windlass.models.experts.arguments import refuse_sparse_experts


def test_a_dense_model_gets_experts_as_wide_as_its_feed_forward():
    experts = apply_model_arguments(model_config("llama-tiny"), {"experts": 4}).experts

    assert experts is not None
    assert (experts.count, experts.per_token, experts.ffn) == (4, 2, 512)
    assert experts.balance_loss > 0


def test_no_experts_make_a_model_dense_and_widths_keep_their_ratio():
    assert apply_model_arguments(model_config("moe-tiny"), {"experts": 0}).experts is None
    wide = apply_model_arguments(model_config("moe-tiny"), {"width": 384}).experts
    assert wide is not None
    assert wide.ffn == 512


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("llama-tiny", {"expert_ffn": 8}, "`expert_ffn` is of experts, of which this model has"),
        ("gpt-tiny", {"experts": 4}, "experts have no bias"),
        ("moe-tiny", {"experts_per_token": 9}, "at most `experts` 8"),
    ],
)
def test_experts_that_do_not_fit_a_model_are_refused(
    model: str, arguments: dict[str, int], message: str
):
    with pytest.raises(ModelError, match=message):
        apply_model_arguments(model_config(model), arguments)


def test_sparse_experts_are_refused():
    with pytest.raises(ModelError, match="has experts, whose weights are all kept"):
        refuse_sparse_experts(model_config("moe-tiny"), sparse=True)
