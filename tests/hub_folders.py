"""Folders of Hugging Face models, written by hand."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from windlass.data.tokenizer import byte_tokenizer

SIZES = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32,
    "vocab_size": 260,
}  # fmt: skip

_SPECIAL = ("<s>", "</s>", "<|turn|>", "<|eot|>")
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
_CHAT_SIZES = {
    "vocab_size": 268, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "bos_token_id": 0, "eos_token_id": [1, 3],
}  # fmt: skip
_FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 96},
    "qwen2": {},
    "olmo2": {},
}
"""Each with the tokenizer habits of its family: Llama 3's and Gemma's put `<s>` before a text, and
Qwen's has no such token."""


def gpt2_folder(path: Path, *, vocabulary: int = 260) -> str:
    """A tiny GPT-2 with its tokenizer, as a name."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": vocabulary}))
    byte_tokenizer().save(path / "tokenizer.json")
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, 16), "wpe.weight": (32, 16)}
    for block in ("h.0", "h.1"):
        shapes |= {
            f"{block}.attn.c_attn.weight": (16, 48), f"{block}.attn.c_attn.bias": (48,),
            f"{block}.attn.c_proj.weight": (16, 16), f"{block}.attn.c_proj.bias": (16,),
            f"{block}.mlp.c_fc.weight": (16, 64), f"{block}.mlp.c_fc.bias": (64,),
            f"{block}.mlp.c_proj.weight": (64, 16), f"{block}.mlp.c_proj.bias": (16,),
        }  # fmt: skip
    for norm in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        shapes |= {f"{norm}.weight": (16,), f"{norm}.bias": (16,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return f"hf:{path}"


def chat_model_folder(path: Path, family: str) -> Path:
    """A small random model of a family with a tokenizer and a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **_CHAT_SIZES, **_FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(path)
    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    adds_bos = family != "qwen2"
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if adds_bos else {})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, **special
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
