"""A Llama with a sliding window and capped scores, built as a user's own file builds a model."""

from dataclasses import replace

from torch import nn

from windlass.models.catalog import apply_model_arguments, model_config
from windlass.models.transformer import build_transformer

WINDOW = 6


def windowed(
    layers: int, width: int, heads: int, sequence: int, vocabulary: int, dropout: float = 0.0
) -> nn.Module:
    """`layers` blocks with grouped queries, whose tokens see `WINDOW` positions each way."""
    dials = {
        "layers": layers, "width": width, "heads": heads, "kv_heads": heads // 2,
        "sequence": sequence, "vocabulary": vocabulary,
    }  # fmt: skip
    del dropout  # what the pool names; a Llama has none
    config = apply_model_arguments(model_config("llama-tiny"), dials)
    return build_transformer(
        replace(config, sliding_window=WINDOW, attention_softcap=5.0, tied_embeddings=False)
    )
