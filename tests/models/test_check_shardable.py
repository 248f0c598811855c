"""Errors name what cannot be sharded and how to fix it."""

import re

import pytest
import torch
from torch import Tensor, nn

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.check_shardable import sharding_errors
from windlass.models.layer_stack import LayerStack, layer_stack_from_module

REGION = {"*.part": "region", "*.part.wide": "column in 3", "*.part.back": "row"}
COUNTED = REGION | {"*.part.heads": "count"}


class Part(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wide = nn.Linear(24, 72)
        self.drop = nn.Dropout(0.1)
        self.back = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)) for p in self.wide(x).chunk(3, dim=-1))
        return self.back(self.drop((q * k + v).reshape(*x.shape[:2], -1)))


class Layer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.part = Part(heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


def user_model(rules: dict[str, str], *, heads: int = 4, tied: bool = False) -> LayerStack:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(40, 24), Layer(heads), Layer(heads), nn.Linear(24, 40))
    if tied:
        module[3].weight = module[0].weight
    return layer_stack_from_module(module, "mine", sharding_rules=rules)


@pytest.mark.parametrize(
    "family", ["gpt3-175b", "gpt-j-6b", "gpt-neox-20b", "llama3-8b", "bert-large"]
)
def test_published_models_can_be_sharded_over_eight_ranks(family: str):
    assert sharding_errors(build_layer_stack(family, {}, device="meta"), 8) == ()


@pytest.mark.parametrize(
    "family", ["gpt3-175b", "gpt-j-6b", "gpt-neox-20b", "llama3-8b", "bert-large"]
)
def test_published_models_can_be_sharded_over_a_grid_of_eight_ranks(family: str):
    assert sharding_errors(build_layer_stack(family, {}, device="meta"), 8, columns=2) == ()


def test_a_module_that_needs_all_features_of_a_token_cannot_be_sharded_over_a_grid():
    rules = COUNTED | {"*.part.drop": "sharded"}
    assert sharding_errors(user_model(rules | {"3": "vocabulary"}), 4, columns=2) == ()
    (error,) = sharding_errors(user_model(rules | {"3": "tokenwise"}), 4, columns=2)
    assert "`Linear` has weights for all features of a token" in error
    assert "shard in one dimension" in error


def test_a_linear_rule_is_only_for_modules_outside_of_regions_that_give_no_logits():
    inside = sharding_errors(user_model(COUNTED | {"*.part.back": "linear"}), 2)
    assert any("`part.back` is a linear in a region" in error for error in inside)
    (logits,) = sharding_errors(user_model(COUNTED | {"*.part.drop": "sharded", "3": "linear"}), 2)
    assert "is a linear that gives logits; name it a vocabulary" in logits


def test_the_head_of_bert_needs_features_that_columns_can_share():
    arguments = {"width": 36, "heads": 4}
    errors = sharding_errors(build_layer_stack("bert-tiny", arguments, device="meta"), 8, columns=8)
    assert any("`transform` has 36 features, which 8 columns cannot" in error for error in errors)


def test_features_that_columns_cannot_share_are_named_with_a_way_out():
    arguments = {"width": 36, "heads": 4}
    errors = sharding_errors(build_layer_stack("gpt-tiny", arguments, device="meta"), 8, columns=8)
    assert any(
        "has 36 features, which 8 columns cannot share equally; use" in error for error in errors
    )


def test_one_rank_has_no_errors():
    assert sharding_errors(user_model({}), 1) == ()


def test_heads_that_do_not_divide_are_named_with_a_way_out():
    arguments = {"width": 48, "heads": 6, "kv_heads": 2, "ffn": 64}
    errors = sharding_errors(build_layer_stack("llama-tiny", arguments, device="meta"), 4)
    assert len(errors) == 2
    assert re.search(r"layer `block0`.*`attention\.input` has 48 .*divides 6$", errors[0])


def test_more_ranks_than_rows_of_the_vocabulary_are_refused():
    errors = sharding_errors(build_layer_stack("gpt-tiny", {"vocabulary": 9}, device="meta"), 6)
    assert "`tokens` has 9 rows, which leave rank 5 without any" in errors[0]


def test_a_users_rules_that_fit_have_no_errors():
    assert sharding_errors(user_model(COUNTED | {"*.part.drop": "sharded"}), 2) == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        pytest.param({}, "no rule says how a `Layer` is sharded", id="no rules"),
        pytest.param(
            COUNTED, "`part.drop` is a dropout inside a region", id="a dropout without a rule"
        ),
        pytest.param({"*.part": "region"}, "without any column or row", id="an empty region"),
        pytest.param(
            {"*.part.wide": "column"}, "a column outside of any region", id="no region around"
        ),
        pytest.param({"*.part": "column"}, "is a `Part`; only an `nn.Linear`", id="no linear map"),
        pytest.param({"0": "region", **COUNTED}, "region of the first layer", id="first layer"),
        pytest.param({"*": "region", **COUNTED}, "region inside a region", id="nested"),
        pytest.param(
            {"*.part.wide": "vocabulary"}, "neither an `nn.Embedding` of the first", id="no head"
        ),
        pytest.param(
            REGION | {"*.part.drop": "sharded"}, "sharded over 2 ranks does not run", id="no count"
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: dict[str, str], message: str):
    assert message in "\n".join(sharding_errors(user_model(rules, heads=8), 2))


def test_a_tokenwise_layer_needs_no_sharding():
    assert (
        sharding_errors(user_model({"1": "tokenwise", "2": "tokenwise", "3": "tokenwise"}), 2) == ()
    )


def test_a_count_that_does_not_divide_is_refused():
    errors = sharding_errors(user_model(COUNTED | {"*.part.drop": "sharded"}, heads=3), 2)
    assert "`part.heads` is 3, which 2 ranks cannot share equally" in errors[0]


def test_tied_weights_must_be_sharded_alike():
    rules = COUNTED | {"*.part.drop": "sharded", "0": "vocabulary"}
    assert (
        "`3.weight` of model `mine` is tied to `0.weight`, but"
        in sharding_errors(user_model(rules, tied=True), 2)[0]
    )
    assert sharding_errors(user_model(rules | {"3": "vocabulary"}, tied=True), 2) == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.pary": "region"}, "matches no module"),
        ({"*.part.head": "count"}, "matches no integer setting"),
        ({"1.part": "region"}, "do not shard `2` as they shard `1`"),
    ],
)
def test_a_rule_must_match_something_and_all_layers_of_a_kind_alike(
    rules: dict[str, str], message: str
):
    with pytest.raises(ModelError, match=message):
        user_model(rules)
