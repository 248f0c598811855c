"""A GPT with eight experts in each block, built as a user's own file builds a model."""

from dataclasses import replace

from torch import nn

from windlass.models.catalog import apply_model_arguments, model_config
from windlass.models.config import ExpertConfig
from windlass.models.transformer import build_transformer

EXPERTS = 8


def experts(
    layers: int, width: int, heads: int, sequence: int, vocabulary: int, dropout: float = 0.0,
    capacity: float = 0.0,
) -> nn.Module:  # fmt: skip
    """`layers` blocks of eight experts, of which a token takes two; without dropout."""
    del dropout  # what the pool names; the plain loop draws in another precision
    dials = {
        "layers": layers, "width": width, "heads": heads, "sequence": sequence,
        "vocabulary": vocabulary, "dropout": 0.0,
    }  # fmt: skip
    config = apply_model_arguments(model_config("gpt-tiny"), dials)
    mixture = ExpertConfig(
        count=EXPERTS, per_token=2, ffn=24, capacity=capacity or None, balance_loss=0.02
    )
    return build_transformer(
        replace(config, ffn_bias=False, tied_embeddings=False, experts=mixture)
    )
