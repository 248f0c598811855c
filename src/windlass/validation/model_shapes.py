"""The shape of the transformer that a row names."""

import re
from collections.abc import Mapping
from dataclasses import replace

from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    at_most,
    leading_count,
    read_count,
    read_number,
    required_numbers,
)
from windlass.validation.published_run import ModelShape

_IMAGE_MODELS = re.compile(r"resne|efficientnet|vit|dit-|unet|gnn", re.IGNORECASE)
_EXPERTS = re.compile(r"\bMoE\b")
_GATED_MODELS = re.compile(r"llama|mistral|smollm", re.IGNORECASE)
_MASKED_MODELS = re.compile(r"bert", re.IGNORECASE)
_VOCABULARY = 50257.0
_MASKED_VOCABULARY = 30522.0
"""Vocabularies of GPT-2 and of BERT."""
_MASKED_SHARE = 0.15
"""Share of positions that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_GATED_MULTIPLE = 256.0


def model_shape(
    row: TableRow, usual_heads: Mapping[float, float], assumptions: list[str]
) -> ModelShape:
    """The shape of a row's model.

    Args:
        row: one row of a table.
        usual_heads: width -> heads, for rows that do not state heads.
        assumptions: receives a sentence for each value that is assumed.

    Raises:
        UnusableRow: the model is not a transformer, or its size is not published.
    """
    name = row.text("model")
    if _IMAGE_MODELS.search(name):
        raise UnusableRow(
            "an image model other than ResNet-50; no constants are fitted for its convolutions"
        )
    if _EXPERTS.search(row.text("notes")):
        raise UnusableRow("a mixture of experts; no stack's graph has its experts and exchanges")
    width, sequence = required_numbers(row, "hidden", "seq")
    masked = bool(_MASKED_MODELS.search(name))
    stated = leading_count(row, "vocab")
    vocabulary = stated or (_MASKED_VOCABULARY if masked else _VOCABULARY)
    if stated is None:
        assumptions.append(f"vocabulary of {vocabulary:g} assumed")
    gated = bool(read_number(row, "ffn")) or bool(_GATED_MODELS.search(name))
    heads = _heads(row, width, usual_heads, assumptions)
    ffn = read_number(row, "ffn") or (_gated_width(width) if gated else 4.0 * width)
    kv_head_share = (read_count(row, "kv_heads") or heads) / heads
    shape = ModelShape(
        layers=1.0, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary,
        kv_head_share=kv_head_share, ffn=ffn, ffn_matrices=3.0 if gated else 2.0,
        vocabulary_matrices=2.0 if gated else 1.0,
        head_position_share=_MASKED_SHARE if masked else 1.0,
    )  # fmt: skip
    layers = read_count(row, "layers") or _layers_from_parameters(row, shape, assumptions)
    return replace(shape, layers=layers)


def _gated_width(width: float) -> float:
    """`8/3 d`, rounded up to a multiple of 256. Source: Touvron et al. 2023, arXiv:2302.13971."""
    return float(-(-8.0 * width / 3.0 // _GATED_MULTIPLE) * _GATED_MULTIPLE)


def _heads(
    row: TableRow, width: float, usual: Mapping[float, float], assumptions: list[str]
) -> float:
    stated = read_count(row, "heads")
    if stated:
        return stated
    heads = usual.get(width) or max(1.0, round(width / 128.0))
    assumptions.append(f"{heads:g} heads assumed")
    return heads


def _layers_from_parameters(row: TableRow, shape: ModelShape, assumptions: list[str]) -> float:
    """Layers that come nearest to the published parameters, a multiple of the pipeline stages."""
    (parameters,) = required_numbers(row, "params")
    stages = read_count(row, "p") or 1.0
    blocks = (parameters - shape.vocabulary_parameters) / shape.parameters_per_block
    layers = max(1.0, round(blocks / stages)) * stages
    at_most("layers", layers)
    billions = parameters / 1e9
    assumptions.append(f"{layers:g} layers computed from {billions:.3g} billion parameters")
    return layers
