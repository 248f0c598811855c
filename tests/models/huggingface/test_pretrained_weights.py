"""Weights of Hugging Face folders, beside the modules of `transformers` itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from windlass.models.build import build_layer_stack
from windlass.models.catalog import model_config
from windlass.models.huggingface.export_layout import export_layout
from windlass.models.huggingface.write_config import config_content
from windlass.models.layer_stack import LayerStack, materialize_layer

NEW_NAMES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 64, "max_position_embeddings": 24,
}  # fmt: skip
OLD_NAMES: dict[str, Any] = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 24,
}  # fmt: skip
ROPE: dict[str, Any] = {
    "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR_ROPE: dict[str, Any] = {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
LLAMA3_ROPE: dict[str, Any] = {
    **ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **NEW_NAMES, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MODERN: dict[str, Any] = {
    **NEW_NAMES, "num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "decoder_bias": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", OLD_NAMES),
    "llama": ("llama", {**NEW_NAMES, "num_key_value_heads": 2, "rope_theta": 5e5}),
    "llama-tied": ("llama", {**NEW_NAMES, "tie_word_embeddings": True, "mlp_bias": True}),
    "llama-3.1": ("llama", {**NEW_NAMES, "head_dim": 12, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("llama", {**NEW_NAMES, "rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "llama-yarn": ("llama", {**NEW_NAMES, "rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    "mistral": ("mistral", {**NEW_NAMES, "num_key_value_heads": 2, "sliding_window": None}),
    "mistral-window": ("mistral", {**NEW_NAMES, "num_key_value_heads": 2, "sliding_window": 6}),
    "gemma2": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "rope_parameters": {"full_attention": LINEAR_ROPE}},
    ),
    "qwen2": ("qwen2", {**NEW_NAMES, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {**NEW_NAMES, "num_key_value_heads": 2, "head_dim": 12}),
    "mixtral": ("mixtral", {**NEW_NAMES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **NEW_NAMES,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ),
    "gptj": ("gptj", {**OLD_NAMES, "rotary_dim": 4}),
    "gpt-neox": ("gpt_neox", NEW_NAMES),
    "gpt-neox-serial": (
        "gpt_neox",
        {**NEW_NAMES, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "bert": ("bert", NEW_NAMES),
    "modernbert": ("modernbert", MODERN),
    "modernbert-biased": ("modernbert", {**MODERN, **BIASES}),
}


def saved(name: str, folder: Path, **changes: object) -> nn.Module:
    """A `transformers` model with random weights, none of which is zero or one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    model_type, sizes = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    is_encoder = model_type in ("bert", "modernbert")
    auto = AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def ours(folder: Path, **arguments: int) -> LayerStack:
    return build_layer_stack(f"hf:{folder}", arguments, device="cpu")


def logits(stack: LayerStack, tokens: Tensor) -> Tensor:
    x = tokens
    for layer in stack.layers:
        x = layer.eval()(x)
    return x


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    model = saved(name, tmp_path)
    tokens = torch.arange(2 * 20).view(2, 20) % 64

    with torch.no_grad():
        expected, mine = model(tokens).logits, logits(ours(tmp_path), tokens)

    # Both sum the same products in float32, in another order.
    assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "modernbert"])
def test_split_blocks_read_the_same_weights(name: str, tmp_path: Path):
    saved(name, tmp_path)
    tokens = torch.arange(20)[None]

    with torch.no_grad():
        whole, split = ours(tmp_path), ours(tmp_path, split_blocks=True)

        blocks = sum(layer.startswith("block") for layer in whole.names)
        assert len(split.layers) == len(whole.layers) + blocks
        assert torch.equal(logits(split, tokens), logits(whole, tokens))


def test_a_layer_that_is_made_alone_has_the_weights_of_the_files(tmp_path: Path):
    saved("llama-tied", tmp_path)
    whole = ours(tmp_path)
    bare = build_layer_stack(f"hf:{tmp_path}", {}, device="meta")

    for index, layer in enumerate(whole.layers):
        alone = materialize_layer(bare, index, seed=7, device="cpu").state_dict()
        assert all(torch.equal(alone[name], value) for name, value in layer.state_dict().items())


def test_a_model_saved_without_its_head_is_read(tmp_path: Path):
    model = saved("gpt2", tmp_path)
    model.base_model.save_pretrained(tmp_path / "base")
    tokens = torch.arange(20)[None]

    with torch.no_grad():
        assert torch.equal(logits(ours(tmp_path / "base"), tokens), logits(ours(tmp_path), tokens))


@pytest.mark.parametrize("name", ["gpt2", "llama", "modernbert", "qwen3-moe"])
def test_the_bytes_that_are_named_of_a_weight_are_its_values(name: str, tmp_path: Path):
    saved(name, tmp_path)
    stack = build_layer_stack(f"hf:{tmp_path}", {}, device="meta")
    weights = stack.weights
    assert weights is not None

    owned = weights.parameters - stack.tied_weights.keys()
    places = {parameter: weights.place(parameter) for parameter in owned}
    named = {parameter: place for parameter, place in places.items() if place is not None}
    for parameter, place in named.items():
        values = weights.read(parameter)
        assert torch.equal(place.read(), values)
        third = values.numel() // 3
        part = place.flat_part(third, (values.numel() - 2 * third,))
        assert torch.equal(part.read(), values.flatten()[third : values.numel() - third])
    # Products that are stored transposed, as GPT-2's, are not there in our order.
    assert (len(named) < len(places)) == (name == "gpt2")


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_written_as_it_was_read(name: str, tmp_path: Path):
    saved(name, tmp_path)
    stack = build_layer_stack(f"hf:{tmp_path}", {}, device="meta")
    layout = export_layout(model_config(f"hf:{tmp_path}"), stack.tied_weights, tokenizer=None)
    assert stack.weights is not None

    parameters = (
        (parameter, stack.weights.read(parameter))
        for layer_name, layer in zip(stack.names, stack.layers, strict=True)
        for path, _ in layer.named_parameters()
        if (parameter := f"{layer_name}.{path}") not in stack.tied_weights
    )
    written = dict(layout.tensors(parameters))

    theirs = load_file(tmp_path / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[tensor], value) for tensor, value in theirs.items())
    assert layout.files["config.json"] == (tmp_path / "config.json").read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_a_config_that_is_written_anew_says_the_same_model(name: str, tmp_path: Path):
    saved(name, tmp_path)
    config = model_config(f"hf:{tmp_path}")

    _, content = config_content(config)
    (tmp_path / "config.json").write_text(json.dumps(content))

    assert model_config(f"hf:{tmp_path}") == config


def test_names_of_earlier_versions_are_read(tmp_path: Path):
    model = saved("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file({**older, "bert.pooler.dense.bias": torch.zeros(32)}, tmp_path / "model.safetensors")
    tokens = torch.arange(20)[None]

    with torch.no_grad():
        assert torch.allclose(
            logits(ours(tmp_path), tokens), model(tokens).logits, atol=1e-5, rtol=1e-5
        )
