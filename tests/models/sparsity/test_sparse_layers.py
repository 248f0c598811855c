"""Linear layers that become sparse: which ones, with what masks, and with what gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from windlass.errors import InputErrors, ModelError
from windlass.models.build import build_layer_stack, layer_stack_of
from windlass.models.layer_stack import LayerStack, materialize_layer
from windlass.schema import SparsityRequest
from windlass.sparsity import BlockSparseLinear, LayerMask, MaskedLinear, save_masks

SMALL = {"layers": 2, "width": 64, "heads": 4, "ffn": 128, "vocabulary": 50}
PATTERNS = {
    "block": SparsityRequest(level=0.5, block=16),
    "block-diagonal": SparsityRequest(level=0.5, block=16, pattern="block-diagonal"),
    "unstructured": SparsityRequest(level=0.9, pattern="unstructured"),
    "2:4": SparsityRequest(pattern="2:4"),
}
EXACT = 1e-12
"""Float64 sums in another order differ by less."""


def sparse_stack(
    request: SparsityRequest, name: str = "gpt-tiny", *, seed: int = 0, device: str = "cpu"
) -> LayerStack:
    return build_layer_stack(name, SMALL, device=device, seed=seed, sparsity=request)


def sparse_modules(stack: LayerStack) -> dict[str, BlockSparseLinear | MaskedLinear]:
    return {
        f"{name}.{path}" if path else name: module
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, module in layer.named_modules()
        if isinstance(module, (BlockSparseLinear, MaskedLinear))
    }


def run(stack: LayerStack, tokens: Tensor) -> Tensor:
    x = tokens
    for layer in stack.layers:
        x = layer(x)
    return x


def dense_copy(module: BlockSparseLinear | MaskedLinear) -> tuple[nn.Linear, Tensor]:
    """A dense layer that computes the same, and where its weights are kept."""
    linear = nn.Linear(module.in_features, module.out_features, dtype=torch.float64)
    if isinstance(module, MaskedLinear):
        weight, kept = module.weight * module.mask, module.mask
    else:
        weight, kept = module.dense_weight(), _kept(module)
    linear.weight.data.copy_(weight.detach())
    linear.bias.data.copy_(module.bias.detach())
    return linear, kept


def _kept(module: BlockSparseLinear) -> Tensor:
    grid = torch.zeros(
        module.out_features // module.block, module.in_features // module.block, dtype=torch.bool
    )
    grid[module.blocks[:, 0].long(), module.blocks[:, 1].long()] = True
    return grid.repeat_interleave(module.block, 0).repeat_interleave(module.block, 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_loss_and_gradients_are_those_of_the_dense_model_with_masked_weights(pattern: str):
    stack = sparse_stack(PATTERNS[pattern])
    for layer in stack.layers:
        layer.double()
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))
    sparse = sparse_modules(stack)
    assert len(sparse) == 8
    run(stack, tokens).logsumexp(-1).sum().backward()
    gradients = {
        name: {path: parameter.grad for path, parameter in module.named_parameters()}
        for name, module in sparse.items()
    }
    masks = {}
    for name, module in sparse.items():
        layer = stack.layers[stack.names.index(name.partition(".")[0])]
        owner, _, leaf = name.partition(".")[2].rpartition(".")
        linear, masks[name] = dense_copy(module)
        setattr(layer.get_submodule(owner), leaf, linear)
    run(stack, tokens).logsumexp(-1).sum().backward()
    for name, module in sparse.items():
        layer = stack.layers[stack.names.index(name.partition(".")[0])]
        dense = layer.get_submodule(name.partition(".")[2])
        wanted = dense.weight.grad * masks[name]
        if isinstance(module, BlockSparseLinear):
            module.values.data.copy_(gradients[name]["values"])
            gradient = module.dense_weight()
        else:
            gradient = gradients[name]["weight"]
        assert (gradient - wanted).abs().max() <= EXACT * wanted.abs().max()
        bias = gradients[name]["bias"]
        assert (bias - dense.bias.grad).abs().max() <= EXACT * bias.abs().max()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "gpt-j-6b"])
def test_equal_layers_stay_one_kind_and_embedding_norms_and_head_stay_dense(
    name: str, pattern: str
):
    stack = sparse_stack(PATTERNS[pattern], name, device="meta")
    assert len(set(stack.kinds)) == 3
    changed = {path.split(".", 1)[1] for path in sparse_modules(stack)}
    expected = {"attention.input", "attention.output", "hidden.input", "hidden.output"}
    assert changed == expected | ({"hidden.gate"} if name == "llama-tiny" else set())
    assert not any(name.startswith(("embedding", "head")) for name in sparse_modules(stack))


def test_parameters_fall_with_density():
    dense = sum(p.numel() for layer in build("gpt-tiny", None).layers for p in layer.parameters())
    half = sum(
        p.numel()
        for layer in build("gpt-tiny", PATTERNS["block"]).layers
        for p in layer.parameters()
    )
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 128)
    assert dense - half == weights / 2


def build(name: str, sparsity: SparsityRequest | None) -> LayerStack:
    return build_layer_stack(name, SMALL, device="meta", sparsity=sparsity)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_depend_on_seed_and_name_alone(pattern: str):
    whole = sparse_modules(sparse_stack(PATTERNS[pattern], seed=3))
    meta = sparse_stack(PATTERNS[pattern], seed=3, device="meta")
    index = meta.names.index("block1")
    alone = materialize_layer(meta, index, seed=3, device="cpu")
    other = sparse_modules(sparse_stack(PATTERNS[pattern], seed=4))
    for path, module in alone.named_modules():
        if isinstance(module, (BlockSparseLinear, MaskedLinear)):
            name = f"block1.{path}"
            assert equal_state(module, whole[name])
            assert not equal_state(module, other[name])
    assert not equal_state(whole["block0.hidden.input"], whole["block1.hidden.input"])


def equal_state(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def test_kept_weights_start_with_the_standard_deviation_of_dense_ones():
    dense = build_layer_stack("gpt-tiny", {}, device="cpu").layers[1].get_submodule("hidden.output")
    request = SparsityRequest(level=0.75, block=16)
    stack = build_layer_stack("gpt-tiny", {}, device="cpu", sparsity=request)
    sparse = stack.layers[1].get_submodule("hidden.output")
    assert isinstance(sparse, BlockSparseLinear)
    ratio = (sparse.values.std() / dense.weight.std()).item()
    assert ratio == pytest.approx(1, abs=0.02)


def own_model() -> nn.Sequential:
    """A model of a user's own: tokens, two layers, logits."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    return nn.Sequential(nn.Embedding(50, 64), *(Wrapped(layer()) for _ in range(2)), Head())


class Wrapped(nn.Module):
    """Keeps a sequence one layer of the stack."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Head(nn.Module):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def own_stack(**settings: object) -> LayerStack:
    request = SparsityRequest.model_validate({"level": 0.5, "block": 16, **settings})
    return layer_stack_of(own_model, "own", {}, device="cpu", seed=0, sparsity=request)


def test_a_users_layers_become_sparse_by_name_and_keep_the_weights_they_had():
    stack = own_stack(modules=("*.inner.1", "*.inner.3"))
    dense = layer_stack_of(own_model, "own", {}, device="cpu", seed=0)
    sparse = sparse_modules(stack)
    assert sorted(sparse) == ["1.inner.1", "1.inner.3", "2.inner.1", "2.inner.3"]
    assert stack.kinds[1] == stack.kinds[2]
    for name, module in sparse.items():
        assert isinstance(module, BlockSparseLinear)
        index, _, path = name.partition(".")
        weight = dense.layers[int(index)].get_submodule(path).weight
        assert torch.equal(module.dense_weight(), weight * _kept(module))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (None, "does not say what its weights do; name the linear layers"),
        (
            "blocks.*.fc",
            r"`blocks.\*.fc` matches no linear layer of `own`; write a name .*`1.inner",
        ),
        ("0", "`0` of `sparsity.modules` is an embedding, which stays dense; leave it out"),
        ("3.logits", "`3.logits` of `sparsity.modules` is in the last layer, whose logits stay"),
        ("1.inner.0", "matches no linear layer"),
        (("0", "nothing"), "is an embedding|matches no linear layer"),
    ],
)
def test_a_filter_that_matches_nothing_or_what_stays_dense_is_refused(
    modules: str | tuple[str, ...] | None, message: str
):
    with pytest.raises((ModelError, InputErrors), match=message):
        own_stack(modules=modules)


def masks_of(stack: LayerStack) -> dict[str, LayerMask]:
    return {
        name: LayerMask(module.out_features, module.in_features, module.block, module.blocks)
        if isinstance(module, BlockSparseLinear)
        else LayerMask(module.out_features, module.in_features, None, module.mask)
        for name, module in sparse_modules(stack).items()
    }


@pytest.mark.parametrize("pattern", ["block", "unstructured"])
def test_a_mask_from_a_file_takes_the_place_of_the_random_one(pattern: str, tmp_path: Path):
    source = sparse_stack(PATTERNS[pattern], seed=7)
    save_masks(tmp_path / "masks.safetensors", masks_of(source))
    request = SparsityRequest(mask=str(tmp_path / "masks.safetensors"), block=16, pattern=pattern)
    stack = sparse_stack(request, seed=1)
    assert stack.kinds == source.kinds
    for name, module in sparse_modules(stack).items():
        other = sparse_modules(source)[name]
        if isinstance(module, MaskedLinear):
            assert torch.equal(module.mask, other.mask)
            assert torch.equal(module.weight != 0, module.mask)
        else:
            assert torch.equal(module.blocks, other.blocks)
            assert (module.groups, module.parts) == (other.groups, other.parts)


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"block": 32}, "gpt-tiny", "has blocks of 16 for .*; set `sparsity.block` = 16"),
        ({"pattern": "2:4"}, "gpt-tiny", "has masks of blocks; set `sparsity.pattern` = block"),
        (
            {},
            "gpt-mini",
            "a mask of 192 x 64 for .* which is 960 x 320; it is of another model",
        ),
        ({}, "gpt-j-6b split", "has a mask of `block0.attention.input`, which this model has not"),
    ],
)
def test_a_mask_of_another_model_or_pattern_is_refused(
    changes: dict[str, object], name: str, message: str, tmp_path: Path
):
    path = tmp_path / "masks.safetensors"
    save_masks(path, masks_of(sparse_stack(PATTERNS["block"])))
    request = SparsityRequest.model_validate({"mask": str(path), "block": 16, **changes})
    arguments = {
        "gpt-tiny": SMALL, "gpt-mini": {}, "gpt-j-6b split": {**SMALL, "split_blocks": True},
    }[name]  # fmt: skip
    catalog = "gpt-tiny" if "split" in name else name
    with pytest.raises((ModelError, InputErrors), match=message):
        build_layer_stack(catalog, arguments, device="meta", sparsity=request)
