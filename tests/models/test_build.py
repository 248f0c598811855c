"""Layer stacks by name, with model arguments."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from windlass.errors import ModelError
from windlass.models import catalog
from windlass.models.build import build_layer_stack
from windlass.models.catalog import apply_model_arguments
from windlass.models.layer_stack import LayerStack, materialize_layer

SMALL = {"layers": 3, "width": 16, "heads": 2, "vocabulary": 32, "sequence": 12}
TINY = {name: name for name in ("gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "llama2-70b")}


def small(
    name: str = "gpt-tiny", *, device: str = "cpu", seed: int = 0, **arguments: int
) -> LayerStack:
    if "llama2-70b" in name:
        arguments = {"heads": 4, "kv_heads": 2, "width": 32, **arguments}
    return build_layer_stack(name, {**SMALL, **arguments}, device=device, seed=seed)


def logits(stack: LayerStack, tokens: torch.Tensor) -> torch.Tensor:
    x = tokens
    for layer in stack.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("name", TINY)
def test_every_family_maps_tokens_to_logits(name: str):
    stack = small(name)

    assert logits(stack, torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 32)


@pytest.mark.parametrize("name", TINY)
def test_no_family_attends_to_later_tokens(name: str):
    stack = small(name)
    tokens = torch.randint(0, 32, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 32

    one, other = logits(stack, tokens), logits(stack, changed)

    assert torch.allclose(one[:, :5], other[:, :5], atol=1e-6)
    assert not torch.allclose(one[:, 5:], other[:, 5:], atol=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_every_family_depends_on_the_order_of_tokens(name: str):
    stack = small(name)
    forward = logits(stack, torch.tensor([[1, 2, 3, 4]]))
    reversed_ = logits(stack, torch.tensor([[2, 1, 3, 4]]))

    assert not torch.allclose(forward[:, -1], reversed_[:, -1], atol=1e-7)


def test_rotary_scores_depend_only_on_distances():
    rotary = small("llama2-70b").layers[1].attention.rotary
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    rotated_query, rotated_key = rotary(query.expand(1, 1, 9, 8), key.expand(1, 1, 9, 8))

    scores = (rotated_query @ rotated_key.transpose(-1, -2))[0, 0]
    for distance in range(9):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)


def test_arguments_change_the_config_and_its_dependent_fields():
    config = apply_model_arguments(
        catalog.model_config("gpt2-124m"), {"width": 1024, "heads": 16, "dropout": 0.1}
    )

    assert (config.width, config.heads, config.kv_heads, config.ffn) == (1024, 16, 16, 4096)
    assert config.dropout == 0.1
    assert config.layers == 12


def test_all_invalid_arguments_are_reported_at_once():
    arguments = {"width": 100, "heads": 12, "kv_heads": 5, "layerz": 2}

    with pytest.raises(ModelError) as error:
        build_layer_stack("gpt2-124m", arguments, device="meta", seed=0)

    message = str(error.value)
    assert "`width` 100 is not divisible by `heads` 12; use `width` 96 or 108" in message
    assert "`heads` 12 is not divisible by `kv_heads` 5" in message
    assert "unknown model argument `layerz`; did you mean `layers`?" in message


def test_a_width_below_the_heads_names_the_nearest_valid_one():
    with pytest.raises(ModelError, match=r"use `width` 4$"):
        build_layer_stack("gpt2-124m", {"width": 3, "heads": 4}, device="meta", seed=0)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_split_block_computes_what_the_block_computes(name: str):
    whole = build_layer_stack(name, {"layers": 2}, device="cpu")
    halved = build_layer_stack(name, {"layers": 2, "split_blocks": True}, device="cpu")
    assert halved.names[1:5] == (
        "block0.attention", "block0.hidden", "block1.attention", "block1.hidden",
    )  # fmt: skip
    assert len(set(halved.kinds)) == len(set(whole.kinds)) + 1
    for block, attention, hidden in zip(
        whole.layers[1:3], halved.layers[1:5:2], halved.layers[2:6:2], strict=True
    ):
        for half, part, normed in (
            (attention, block.attention, block.attention_norm),
            (hidden, block.hidden, block.hidden_norm),
        ):
            half.branch.load_state_dict(part.state_dict())
            half.norm.load_state_dict(normed.state_dict())
    halved.layers[-1].load_state_dict(whole.layers[-1].state_dict())
    halved.layers[0].load_state_dict(whole.layers[0].state_dict())
    tokens = torch.randint(whole.vocabulary, (2, 8))
    assert torch.equal(logits(halved, tokens), logits(whole, tokens))


def test_a_parallel_block_cannot_be_split():
    with pytest.raises(ModelError, match="in parallel; leave it out"):
        build_layer_stack("gpt-j-6b", {"split_blocks": True}, device="meta")


def test_zero_heads_are_refused():
    with pytest.raises(ModelError, match="`heads` is 0, must be at least 1"):
        build_layer_stack("gpt-tiny", {"heads": 0}, device="meta", seed=0)


def test_the_largest_model_is_built_without_memory_and_has_three_kinds_of_layer():
    stack = build_layer_stack("gpt3-175b", {}, device="meta", seed=0)

    assert len(stack.layers) == 98
    assert stack.kinds == ("embedding", *["block"] * 96, "head")
    assert all(p.is_meta for layer in stack.layers for p in layer.parameters())


def test_a_tied_head_is_the_embedding_itself():
    stack = small()

    assert stack.tied_weights == {"head.projection.weight": "embedding.tokens.weight"}
    assert stack.layers[-1].projection.weight is stack.layers[0].tokens.weight


def test_weights_start_as_in_gpt2():
    stack = build_layer_stack("gpt-tiny", {}, device="cpu", seed=1)
    block = stack.layers[1]

    assert block.attention.input.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.hidden.output.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert stack.layers[0].tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not block.hidden.input.bias.any()
    assert block.attention_norm.weight.eq(1).all()


@settings(max_examples=25)
@given(st.permutations(range(5)), st.integers(1, 5), st.integers(0, 2**40))
def test_weights_do_not_depend_on_which_layers_are_built_or_when(
    order: list[int], count: int, seed: int
):
    whole = small(seed=seed)
    meta = small(device="meta")
    torch.manual_seed(count)

    for index in order[:count]:
        alone = materialize_layer(meta, index, seed=seed, device="cpu")
        theirs = whole.layers[index].state_dict()
        assert all(torch.equal(theirs[key], value) for key, value in alone.state_dict().items())


def test_layers_of_one_kind_get_different_weights_and_so_do_seeds():
    one, other = small(seed=1), small(seed=2)

    assert not torch.equal(one.layers[1].hidden.input.weight, one.layers[2].hidden.input.weight)
    assert not torch.equal(one.layers[1].hidden.input.weight, other.layers[1].hidden.input.weight)


def test_building_leaves_the_generator_of_the_caller_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    small(seed=7)

    assert torch.equal(torch.rand(1), expected)
