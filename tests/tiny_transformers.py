"""Tiny models of transformers, each of another architecture, saved as folders of Hugging Face."""

import inspect
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_embd": 64, "n_layer": 3,
    "n_head": 4, "n_inner": 128, "d_model": 64, "num_layers": 3, "num_heads": 4, "ffn_dim": 128,
    "word_embed_proj_dim": 64, "embedding_size": 64, "n_layers": 3, "dim": 64, "n_heads": 4,
    "hidden_dim": 128, "attention_head_size": 16,
    # Positions, tokens with a meaning, images.
    "max_position_embeddings": 128, "n_positions": 128, "rotary_dim": 8, "sliding_window": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "image_size": 16, "patch_size": 4, "num_labels": 5,
    # Experts, and latent queries and keys.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "shared_intermediate_size": 64,
    # State spaces and linear attention.
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "conv_kernel": 4,
    "ssm_state_size": 8, "state_size": 8, "n_groups": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""Settings under all names that configurations have for them."""
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 128},
    "roberta": {"max_position_embeddings": 130},
    "xlm-roberta": {"max_position_embeddings": 130},
}
"""Settings of one architecture; None leaves it its own."""
WRITERS = (
    "cohere", "cohere2", "deepseek_v3", "exaone4", "falcon", "falcon_h1", "gemma", "glm", "glm4",
    "glm4_moe", "gpt_oss", "granite", "granitemoe", "mamba2", "minimax", "ministral", "nemotron",
    "nemotron_h", "olmo2", "olmo3", "olmoe", "opt", "bloom", "phi", "phi3", "qwen3_next",
    "smollm3", "stablelm", "starcoder2", "helium", "ernie4_5", "seed_oss", "arcee", "dots1",
)  # fmt: skip
READERS = ("roberta", "xlm-roberta", "electra", "deberta-v2", "distilbert")
IMAGES = ("dinov2", "ijepa")
ARCHITECTURES = (*WRITERS, *READERS, *IMAGES)
"""Those that no table of ours knows, by `model_type`."""


def tiny_model(model_type: str) -> Any:  # noqa: ANN401  a model of transformers
    """A model with random weights that are no zeros, in float32."""
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForMaskedLM,
    )

    config_class = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(config_class).parameters)
    for base in config_class.__mro__:
        known |= vars(base).keys() | getattr(base, "__annotations__", {}).keys()
    settings = {**SIZES, **OWN.get(model_type, {})}
    config = config_class(**{k: v for k, v in settings.items() if k in known and v is not None})
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and value and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)
    config.use_cache = False
    heads = {
        **dict.fromkeys(READERS, AutoModelForMaskedLM),
        **dict.fromkeys(IMAGES, AutoModelForImageClassification),
    }
    torch.manual_seed(0)
    model = heads.get(model_type, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def tiny_folder(model_type: str, path: Path) -> tuple[str, Any]:
    """The name of a folder with such a model, and the model."""
    model = tiny_model(model_type)
    model.save_pretrained(path)
    return f"hf:{path}", model


def tiny_input(model: Any, count: int = 2) -> torch.Tensor:  # noqa: ANN401
    """Tokens of 32 a row, or images."""
    torch.manual_seed(1)
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        return torch.randn(count, model.config.num_channels, side, side)
    return torch.randint(3, 256, (count, 32))
