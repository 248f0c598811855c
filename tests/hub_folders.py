"""Folders of Hugging Face models, written by hand."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from windlass.data.tokenizer import byte_tokenizer

SIZES = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32,
    "vocab_size": 260,
}  # fmt: skip


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
