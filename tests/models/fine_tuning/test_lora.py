"""Adapters beside linear layers, and frozen weights by pattern."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from windlass.capture.capture_layers import capture_graph
from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.experts.expert_linear import LoraExpertLinear
from windlass.models.experts.routing import LoraRouter
from windlass.models.fine_tuning.lora import Adapted, LoraLinear
from windlass.models.layer_stack import LayerStack
from windlass.schema.model_request import LoraRequest

DIALS = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "sequence": 16}


def gpt(lora: LoraRequest | None = None, frozen: tuple[str, ...] | None = None) -> LayerStack:
    return build_layer_stack("gpt-tiny", DIALS, device="cpu", lora=lora, frozen=frozen)


def moe(lora: LoraRequest | None = None) -> LayerStack:
    return build_layer_stack(
        "moe-tiny", {**DIALS, "kv_heads": 4, "experts": 4}, device="cpu", lora=lora
    )


def weights(stack: LayerStack) -> Iterator[tuple[str, nn.Parameter]]:
    for name, layer in zip(stack.names, stack.layers, strict=True):
        for path, weight in layer.named_parameters():
            yield f"{name}.{path}", weight


def logits(stack: LayerStack) -> torch.Tensor:
    x = torch.arange(32).view(2, 16)
    with torch.no_grad():
        for layer in stack.layers:
            x = layer(x)
    return x


def add_products(adapted: LayerStack, merged: LayerStack, kind: type[Adapted], std: float) -> None:
    """Draws B of all adapters of a kind, and adds 3 / 4 of each product to the merged weight."""
    merged_layers = dict(zip(merged.names, merged.layers, strict=True))
    for name, layer in zip(adapted.names, adapted.layers, strict=True):
        for path, module in layer.named_modules():
            if isinstance(module, kind):
                nn.init.normal_(module.lora_b, std=std)
                target = merged_layers[name].get_submodule(path)
                with torch.no_grad():
                    target.weight += 3 / 4 * module.lora_b @ module.lora_a


def test_new_adapters_leave_every_weight_and_output_of_the_base_as_they_are():
    base, adapted = gpt(), gpt(LoraRequest(rank=4))

    theirs = dict(weights(adapted))
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights(base))
    assert torch.equal(logits(base), logits(adapted))


def test_an_adapter_adds_its_scaled_product_to_the_weight():
    adapted, merged = gpt(LoraRequest(rank=4, alpha=3.0)), gpt()
    add_products(adapted, merged, LoraLinear, std=0.1)

    # Two products in place of one round differently: 1e-5 of logits near 1.
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=0, atol=1e-5)


def test_a_router_has_no_adapter_where_none_is_named():
    unasked = dict(weights(moe(LoraRequest(rank=4))))
    assert not any("router.lora" in name for name in unasked)


def test_an_adapter_beside_a_router_adds_its_product_to_the_weight():
    adapted = moe(LoraRequest(rank=4, alpha=3.0, targets=("router",)))
    assert torch.equal(logits(moe()), logits(adapted))
    merged = moe()
    add_products(adapted, merged, LoraRouter, std=0.5)
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=0, atol=1e-5)
    assert (logits(moe()) - logits(merged)).abs().max() > 1e-3


def test_each_expert_has_an_adapter_that_adds_its_product_to_the_experts_weight():
    adapted = moe(LoraRequest(rank=4, alpha=3.0, targets=("experts.*",)))
    assert torch.equal(logits(moe()), logits(adapted))
    merged = moe()
    add_products(adapted, merged, LoraExpertLinear, std=0.1)
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=0, atol=1e-5)
    assert (logits(adapted) - logits(moe())).abs().max() > 1e-3


def test_adapters_of_experts_and_routers_have_no_dropout():
    with pytest.raises(ModelError, match=r"`lora.dropout` = 0.1 with adapters beside `block0"):
        moe(LoraRequest(dropout=0.1))
    with pytest.raises(ModelError, match="routers and experts have none"):
        moe(LoraRequest(dropout=0.1, targets=("router",)))
    moe(LoraRequest(dropout=0.1, targets=("attention.*",)))


def test_only_adapters_of_the_named_layers_are_trained():
    trained = {
        name for name, w in weights(gpt(LoraRequest(targets=("hidden.*",)))) if w.requires_grad
    }
    assert trained == {
        f"block{block}.hidden.{linear}.lora_{factor}"
        for block in (0, 1)
        for linear in ("input", "output")
        for factor in "ab"
    }


def test_weights_are_frozen_by_patterns_of_their_names():
    frozen = {name for name, w in weights(gpt(frozen=("block0.*",))) if not w.requires_grad}
    assert frozen == {name for name, _ in weights(gpt()) if name.startswith("block0.")}


@pytest.mark.parametrize(
    ("lora", "frozen", "message"),
    [
        (LoraRequest(targets=("q_proj",)), None, r"`q_proj`.*it has `block0\.attention\.input`"),
        (LoraRequest(targets=("nothing.*",)), None, "no linear layer of `gpt-tiny`"),
        (None, ("blocks.*",), "no weight of `gpt-tiny` has such a name"),
        (None, ("*",), r"all \d+ weights of `gpt-tiny` are frozen"),
    ],
)
def test_a_pattern_that_fits_no_model_is_refused(
    lora: LoraRequest | None, frozen: tuple[str, ...] | None, message: str
):
    with pytest.raises(ModelError, match=message):
        gpt(lora, frozen)


def test_a_graph_counts_no_gradient_of_frozen_weights():
    graph = capture_graph(build_layer_stack("gpt-tiny", DIALS, device="meta", lora=LoraRequest()))

    block = graph.kinds["block"]
    trained = sum(8 * (inputs + outputs) for inputs, outputs in _LINEARS)
    assert block.trained_count == trained == sum(block.pass_gradient_elements(1, 16))
    assert graph.trained_count == 2 * trained
    assert graph.parameter_count == sum(w.numel() for _, w in weights(gpt())) + 2 * trained - _TIED
    # Each product needs two in a backward pass, and one for the input alone where it is frozen.
    cost = block.cost("float32", compiled=False)
    products = [op for op in cost.backward if op.kind == "matmul"]
    assert len(products) == len(_LINEARS) * (1 + 2 + 2)


_LINEARS = ((32, 96), (32, 32), (32, 128), (128, 32))
"""Inputs and outputs of a block's linear layers."""
_TIED = 64 * 32
"""Elements of the head's weight, which is the embedding's."""
