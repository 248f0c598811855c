"""What cannot be cut is said, with the way out."""

import re

import pytest
import torch
from torch import Tensor, nn

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_stack_from_module
from windlass.models.check_shardable import sharding_errors
from windlass.models.tensor_parallel.sharding_rules import rules_from_hf_tp_plan

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


def own(rules: dict[str, str], *, heads: int = 4, tied: bool = False) -> LayerStack:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(40, 24), Layer(heads), Layer(heads), nn.Linear(24, 40))
    if tied:
        module[3].weight = module[0].weight
    return layer_stack_from_module(module, "own", sharding_rules=rules)


@pytest.mark.parametrize(
    "family", ["gpt3-175b", "gpt-j-6b", "gpt-neox-20b", "llama3-8b", "bert-large"]
)
def test_published_models_can_be_cut_over_eight_slices(family: str):
    assert sharding_errors(build_layer_stack(family, {}, device="meta"), 8) == ()


@pytest.mark.parametrize(
    "family", ["gpt3-175b", "gpt-j-6b", "gpt-neox-20b", "llama3-8b", "bert-large"]
)
def test_published_models_can_be_cut_over_a_grid_of_eight_slices(family: str):
    assert sharding_errors(build_layer_stack(family, {}, device="meta"), 8, columns=2) == ()


def test_what_takes_all_features_of_a_token_cannot_be_cut_over_a_grid():
    rules = COUNTED | {"*.part.drop": "features"}
    assert sharding_errors(own(rules | {"3": "vocabulary"}), 4, columns=2) == ()
    (fault,) = sharding_errors(own(rules | {"3": "alone"}), 4, columns=2)
    assert "`Linear` has weights for all features of a token" in fault
    assert "cut in one dimension" in fault


def test_a_map_stands_outside_of_regions_and_gives_no_logits():
    inside = sharding_errors(own(COUNTED | {"*.part.back": "map"}), 2)
    assert any("`part.back` is a map in a region" in each for each in inside)
    (logits,) = sharding_errors(own(COUNTED | {"*.part.drop": "features", "3": "map"}), 2)
    assert "is a map that gives logits; name it a vocabulary" in logits


def test_the_head_of_bert_needs_features_that_columns_can_share():
    dials = {"width": 36, "heads": 4}
    found = sharding_errors(build_layer_stack("bert-tiny", dials, device="meta"), 8, columns=8)
    assert any("`transform` has 36 features, which 8 columns cannot" in each for each in found)


def test_features_that_columns_cannot_share_are_named_with_a_way_out():
    dials = {"width": 36, "heads": 4}
    found = sharding_errors(build_layer_stack("gpt-tiny", dials, device="meta"), 8, columns=8)
    assert any("has 36 features, which 8 columns cannot share equally; take" in f for f in found)


def test_nothing_is_wrong_with_one_slice():
    assert sharding_errors(own({}), 1) == ()


def test_heads_that_do_not_divide_are_named_with_a_way_out():
    dials = {"width": 48, "heads": 6, "kv_heads": 2, "ffn": 64}
    found = sharding_errors(build_layer_stack("llama-tiny", dials, device="meta"), 4)
    assert len(found) == 2
    assert re.search(r"layer `block0`.*`attention\.input` has 48 .*divides 6$", found[0])


def test_more_slices_than_rows_of_the_vocabulary_are_refused():
    found = sharding_errors(build_layer_stack("gpt-tiny", {"vocabulary": 9}, device="meta"), 6)
    assert "`tokens` has 9 rows, which leave slice 5 without any" in found[0]


def test_rules_of_a_user_that_fit_are_found_right():
    assert sharding_errors(own(COUNTED | {"*.part.drop": "features"}), 2) == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        pytest.param({}, "no rule says how a `Layer` is cut", id="no rules"),
        pytest.param(COUNTED, "`part.drop` drops inside a region", id="a dropout of unknown place"),
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
            REGION | {"*.part.drop": "features"}, "cut over 2 slices does not run", id="no count"
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: dict[str, str], message: str):
    assert message in "\n".join(sharding_errors(own(rules, heads=8), 2))


def test_a_layer_that_treats_each_token_alone_needs_no_cut():
    assert sharding_errors(own({"1": "alone", "2": "alone", "3": "alone"}), 2) == ()


def test_a_count_that_does_not_divide_is_refused():
    found = sharding_errors(own(COUNTED | {"*.part.drop": "features"}, heads=3), 2)
    assert "`part.heads` is 3, which 2 slices cannot share equally" in found[0]


def test_tied_weights_must_be_cut_alike():
    rules = COUNTED | {"*.part.drop": "features", "0": "vocabulary"}
    assert "`3.weight` of model `own` is `0.weight`, but" in sharding_errors(own(rules, tied=True), 2)[0]
    assert sharding_errors(own(rules | {"3": "vocabulary"}, tied=True), 2) == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.pary": "region"}, "is for no module"),
        ({"*.part.head": "count"}, "is for no setting that is a whole number"),
        ({"1.part": "region"}, "do not cut `2` as they cut `1`"),
    ],
)
def test_a_rule_must_be_for_something_and_for_all_its_equals(rules: dict[str, str], message: str):
    with pytest.raises(ModelError, match=message):
        own(rules)


LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "embed_tokens": "embedding_rowwise",
}


def test_a_published_tensor_plan_becomes_rules():
    assert rules_from_hf_tp_plan(LLAMA, {"lm_head": "colwise_rep"}) == {
        "model.layers.*.self_attn": "region",
        "model.layers.*.self_attn.q_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp": "region",
        "model.layers.*.mlp.gate_up_proj": "column in 2",
        "model.layers.*.mlp.down_proj": "row",
        "model.embed_tokens": "vocabulary",
        "lm_head": "vocabulary",
    }


def test_a_published_style_without_a_counterpart_is_refused():
    with pytest.raises(ModelError, match=r"`layers\.\*\.mlp\.experts` is `moe_tp_experts`"):
        rules_from_hf_tp_plan({**LLAMA, "layers.*.mlp.experts": "moe_tp_experts"}, {})
