"""The shape of the transformer that a row names."""

import re
from collections.abc import Mapping
from dataclasses import replace

from windlass.models import ExpertConfig, LatentAttention
from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    at_most,
    leading_count,
    read_count,
    read_number,
    required_numbers,
    shown_cell,
)
from windlass.validation.published_run import ModelShape

_IMAGE_MODELS = re.compile(r"resne|efficientnet|vit|dit-|unet|gnn", re.IGNORECASE)
_EXPERTS = re.compile(r"\bMoE\b")
_EXPERT_COLUMNS = {
    "expert_parallel": 1, "experts_per_token": 0, "expert_ffn": 0, "shared_ffn": 0,
    "dense_layers": 0,
}  # fmt: skip
"""Columns of experts with the largest number that a dense model may state."""
_ATTENTION = re.compile(r"(?P<kind>|mha|gqa|mla)(, window (?P<window>\d+) in every other layer)?")
_LATENT = LatentAttention(
    query_rank=1536, key_rank=512, plain_width=128, rotary_width=64, value_width=128
)
"""Source: the published configurations of DeepSeek-V3 and of Kimi-K2, which has the same widths."""
_GATED_MODELS = re.compile(r"llama|mistral|smollm", re.IGNORECASE)
_MASKED_MODELS = re.compile(r"bert", re.IGNORECASE)
_VOCABULARY = 50257.0
_MASKED_VOCABULARY = 30522.0
"""Vocabularies of GPT-2 and of BERT."""
_MASKED_SHARE = 0.15
"""Share of positions that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_GATED_MULTIPLE = 256.0
_SAME_SHAPE, _SAME_HEAD, _OTHER_MODEL = 0.05, 0.01, 0.25
"""Differences between the parameters of a shape and those that a row states: rounding of a name
such as `7B`; so near that another head explains it; so far that it is no such model."""


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
    width, sequence = required_numbers(row, "hidden", "seq")
    heads = _heads(row, width, usual_heads, assumptions)
    masked = bool(_MASKED_MODELS.search(name))
    stated = leading_count(row, "vocab")
    vocabulary = stated or (_MASKED_VOCABULARY if masked else _VOCABULARY)
    if stated is None:
        assumptions.append(f"vocabulary of {vocabulary:g} assumed")
    gated = bool(read_number(row, "ffn")) or bool(_GATED_MODELS.search(name))
    ffn = read_number(row, "ffn") or (_gated_width(width) if gated else 4.0 * width)
    kv_head_share = (read_count(row, "kv_heads") or heads) / heads
    shape = ModelShape(
        layers=1.0, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary,
        kv_head_share=kv_head_share, ffn=ffn, ffn_matrices=3.0 if gated else 2.0,
        vocabulary_matrices=2.0 if gated else 1.0, head_width=read_number(row, "head_dim") or 0.0,
        experts=_experts(row), adapter=read_count(row, "lora_rank") or 0.0,
        head_position_share=_MASKED_SHARE if masked else 1.0,
    )  # fmt: skip
    shape = _with_attention(row, shape, assumptions)
    layers = read_count(row, "layers")
    if layers is None:
        return replace(shape, layers=_layers_from_parameters(row, shape, assumptions))
    return _as_many_parameters(row, replace(shape, layers=layers), assumptions)


def _experts(row: TableRow) -> ExpertConfig | None:
    """The mixture of experts that a row states; None for a dense model.

    Raises:
        UnusableRow: the row says that there are experts, and not how many, or how large.
    """
    if (read_number(row, "experts") or 0) <= 1:
        for column, most in _EXPERT_COLUMNS.items():
            if (read_number(row, column) or 0) > most:
                raise UnusableRow(f"{shown_cell(row, column)}, but `experts` is not published")
        if _EXPERTS.search(row.text("notes")):
            raise UnusableRow("a mixture of experts, by its notes; `experts` is not published")
        return None
    count, per_token, ffn = required_numbers(row, "experts", "experts_per_token", "expert_ffn")
    shared, dense = read_number(row, "shared_ffn"), read_number(row, "dense_layers") or 0.0
    return ExpertConfig(
        count=round(count), per_token=round(per_token), ffn=round(ffn),
        shared_ffn=round(shared) if shared else None, dense_layers=round(dense),
    )  # fmt: skip


def _with_attention(row: TableRow, shape: ModelShape, assumptions: list[str]) -> ModelShape:
    """The shape with the attention that a row names."""
    found = _ATTENTION.fullmatch(row.text("attention").lower())
    if found is None:
        raise UnusableRow(f"{shown_cell(row, 'attention')} is computed by no stack's graph")
    if found["kind"] == "gqa":
        required_numbers(row, "kv_heads")
    if found["window"]:
        shape = replace(shape, window=float(found["window"]))
    if found["kind"] != "mla":
        return shape
    assumptions.append("latent attention of the widths of DeepSeek-V3 assumed")
    return replace(shape, latent=_LATENT)


def _as_many_parameters(row: TableRow, shape: ModelShape, assumptions: list[str]) -> ModelShape:
    """The shape, with the gates and the separate head that `params` tells it has.

    Raises:
        UnusableRow: the shape has another number of parameters.
    """
    parameters = read_number(row, "params")
    if not parameters:
        if read_number(row, "ffn") and not _GATED_MODELS.search(row.text("model")):
            assumptions.append("a gated feed-forward network assumed")
        return shape
    matrices = (3.0, 2.0) if read_number(row, "ffn") else (shape.ffn_matrices,)
    readings = [
        replace(shape, ffn_matrices=ffn, vocabulary_matrices=vocabulary)
        for ffn in matrices
        for vocabulary in (1.0, 2.0)
    ]
    nearest = min((shape, *readings), key=lambda each: abs(each.parameters / parameters - 1))
    if abs(shape.parameters / parameters - 1) <= _SAME_SHAPE:
        return shape
    positions = shape.sequence * shape.width  # a table of learned ones, which costs no product
    if abs((shape.parameters + positions) / parameters - 1) <= _SAME_HEAD:
        return shape
    factor = nearest.parameters / parameters
    if abs(factor - 1) <= _SAME_SHAPE and nearest.ffn_matrices != shape.ffn_matrices:
        assumptions.append("no gate in the feed-forward network, by its parameters")
        return nearest
    if abs(factor - 1) <= _SAME_HEAD:
        head = "of its own" if nearest.vocabulary_matrices > 1 else "tied to the embedding"
        assumptions.append(f"a head {head}, by its parameters")
        return nearest
    stated = f"{shape.parameters / 1e9:.3g} billion parameters, and `params` says "
    stated += f"{parameters / 1e9:.3g} billion"
    if abs(factor - 1) > _OTHER_MODEL:
        raise UnusableRow(f"the shape has {stated}, as of another model")
    assumptions.append(f"the shape has {stated}")
    return shape


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
