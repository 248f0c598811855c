"""Settings of a GPT that all follow from its depth, by published rules."""

from math import log2
from typing import Any

_WIDTH_PER_LAYER = 64
"""Source: nanochat (Karpathy 2025), where a model is 64 times as wide as it is deep."""
_HEAD_WIDTH = 64
"""Source: Brown et al. 2020, arXiv:2005.14165, table 2.1, models up to 760 M."""
_LEAST_FITTED_FLOP = 1e17
"""The smallest run that the law of the learning rate was fitted to. Source: as for the law."""


def depth_settings(
    depth: int, *, tokens_per_weight: float, vocabulary: int, sequence: int
) -> dict[str, Any]:
    """Keys of a request for a GPT of some depth: its shape, batch, learning rate and steps.

    With M FLOP a token and D tokens, C = M D; the batch is `0.2920 C^0.3271` tokens and the rate
    `0.3118 C^-0.1250`. M is `72 l d^2 + 12 l d s`, without the embeddings.
    Source: DeepSeek-AI 2024, arXiv:2401.02954, sections 3.1 and 3.2.

    A run of fewer FLOP than the law was fitted to takes the rate of the smallest that was: without
    a bound the law gives two layers 0.0079, and their losses then differ by 0.9 between seeds.

    Args:
        depth: number of blocks.
        tokens_per_weight: tokens that are trained on for each weight; 20 by Hoffmann et al. 2022.
        vocabulary: entries of the embedding, which counts as weights.
        sequence: tokens of one sequence.
    """
    width = _WIDTH_PER_LAYER * depth
    weights = 12 * depth * width**2 + (vocabulary + sequence) * width
    tokens = tokens_per_weight * weights
    flop = (72 * depth * width**2 + 12 * depth * width * sequence) * tokens
    # A power of two divides evenly over devices.
    batch = 2 ** max(0, round(log2(0.2920 * flop**0.3271 / sequence)))
    rate = 0.3118 * max(flop, _LEAST_FITTED_FLOP) ** -0.1250
    return {
        "model.layers": depth,
        "model.width": width,
        "model.heads": width // _HEAD_WIDTH,
        "train.batch": batch,
        "train.learning_rate": float(f"{rate:.3g}"),
        "train.steps": max(1, round(tokens / (batch * sequence))),
    }
