"""Shapes: the model that a row names, as far as its cost goes."""

import re
from collections.abc import Mapping

from windlass.validation.csv_table import (
    TableRow,
    UnusableRow,
    leading_number,
    read_count,
    read_number,
    required_numbers,
)
from windlass.validation.published_run import ModelShape

_IMAGES = re.compile(r"resne|efficientnet|vit|dit-|unet|gnn", re.IGNORECASE)
_GATED = re.compile(r"llama|mistral|smollm", re.IGNORECASE)
_MASKED = re.compile(r"bert", re.IGNORECASE)
_VOCABULARY = 50257.0
_MASKED_SHARE = 0.15
"""Of positions, that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_GATED_MULTIPLE = 256.0


def model_shape(row: TableRow, usual_heads: Mapping[float, float], told: list[str]) -> ModelShape:
    """The shape of a row's model.

    Args:
        row: of a table.
        usual_heads: width -> heads, for rows that do not state heads.
        told: takes a sentence for each thing that had to be taken.

    Raises:
        Unsaid: it is no transformer, or its size is not published.
    """
    name = row.text("model")
    if _IMAGES.search(name):
        raise UnusableRow(
            "an image model other than ResNet-50, whose convolutions no constant is fitted for"
        )
    width, sequence = required_numbers(row, "hidden", "seq")
    stated = leading_number(row, "vocab")
    if stated is None:
        told.append(f"vocabulary of {_VOCABULARY:g} taken")
    vocabulary = stated or _VOCABULARY
    gated = bool(read_number(row, "ffn")) or bool(_GATED.search(name))
    heads = _heads(row, width, usual_heads, told)
    hidden = read_number(row, "ffn") or (_gated_width(width) if gated else 4.0 * width)
    key_share = (read_count(row, "kv_heads") or heads) / heads
    shape = ModelShape(
        layers=1.0, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary,
        kv_head_share=key_share, ffn=hidden, ffn_matrices=3.0 if gated else 2.0,
        vocabulary_matrices=2.0 if gated else 1.0, head_position_share=_MASKED_SHARE if _MASKED.search(name) else 1.0,
    )  # fmt: skip
    layers = read_count(row, "layers") or _layers(row, shape, told)
    return ModelShape(**{**_fields(shape), "layers": layers})


def _fields(shape: ModelShape) -> dict[str, float]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def _gated_width(width: float) -> float:
    """`8/3 d`, up to a multiple of 256. Source: Touvron et al. 2023, arXiv:2302.13971."""
    return float(-(-8.0 * width / 3.0 // _GATED_MULTIPLE) * _GATED_MULTIPLE)


def _heads(row: TableRow, width: float, usual: Mapping[float, float], told: list[str]) -> float:
    stated = read_count(row, "heads")
    if stated:
        return stated
    taken = usual.get(width) or max(1.0, round(width / 128.0))
    told.append(f"{taken:g} heads taken")
    return taken


def _layers(row: TableRow, shape: ModelShape, told: list[str]) -> float:
    """Layers from the parameters: the multiple of the stages that comes nearest."""
    (parameters,) = required_numbers(row, "params")
    stages = read_count(row, "p") or 1.0
    layers = (
        max(
            1.0,
            round((parameters - shape.vocabulary_parameters) / shape.parameters_per_block / stages),
        )
        * stages
    )
    told.append(f"{layers:g} layers taken, from {parameters / 1e9:.3g} billion parameters")
    return layers
