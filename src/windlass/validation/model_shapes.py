"""Shapes: the model that a row names, as far as its cost goes."""

import re
from collections.abc import Mapping

from windlass.validation.csv_table import Row, Unsaid, count, leading, needed, number
from windlass.validation.runs import Shape

_IMAGES = re.compile(r"resne|efficientnet|vit|dit-|unet|gnn", re.IGNORECASE)
_GATED = re.compile(r"llama|mistral|smollm", re.IGNORECASE)
_MASKED = re.compile(r"bert", re.IGNORECASE)
_VOCABULARY = 50257.0
_MASKED_SHARE = 0.15
"""Of positions, that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_GATED_MULTIPLE = 256.0


def shape_of(row: Row, usual_heads: Mapping[float, float], told: list[str]) -> Shape:
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
        raise Unsaid(
            "an image model other than ResNet-50, whose convolutions no constant is fitted for"
        )
    width, sequence = needed(row, "hidden", "seq")
    stated = leading(row, "vocab")
    if stated is None:
        told.append(f"vocabulary of {_VOCABULARY:g} taken")
    vocabulary = stated or _VOCABULARY
    gated = bool(number(row, "ffn")) or bool(_GATED.search(name))
    heads = _heads(row, width, usual_heads, told)
    hidden = number(row, "ffn") or (_gated_width(width) if gated else 4.0 * width)
    key_share = (count(row, "kv_heads") or heads) / heads
    shape = Shape(
        layers=1.0, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary,
        key_share=key_share, hidden=hidden, matrices=3.0 if gated else 2.0,
        tables=2.0 if gated else 1.0, scored=_MASKED_SHARE if _MASKED.search(name) else 1.0,
    )  # fmt: skip
    layers = count(row, "layers") or _layers(row, shape, told)
    return Shape(**{**_fields(shape), "layers": layers})


def _fields(shape: Shape) -> dict[str, float]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def _gated_width(width: float) -> float:
    """`8/3 d`, up to a multiple of 256. Source: Touvron et al. 2023, arXiv:2302.13971."""
    return float(-(-8.0 * width / 3.0 // _GATED_MULTIPLE) * _GATED_MULTIPLE)


def _heads(row: Row, width: float, usual: Mapping[float, float], told: list[str]) -> float:
    stated = count(row, "heads")
    if stated:
        return stated
    taken = usual.get(width) or max(1.0, round(width / 128.0))
    told.append(f"{taken:g} heads taken")
    return taken


def _layers(row: Row, shape: Shape, told: list[str]) -> float:
    """Layers from the parameters: the multiple of the stages that comes nearest."""
    (parameters,) = needed(row, "params")
    stages = count(row, "p") or 1.0
    layers = max(1.0, round((parameters - shape.table) / shape.block / stages)) * stages
    told.append(f"{layers:g} layers taken, from {parameters / 1e9:.3g} billion parameters")
    return layers
