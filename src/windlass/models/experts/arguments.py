"""Experts by the arguments of a request, such as `model.experts=8` (without torch)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.errors import ModelError
from windlass.models.config import ExpertConfig

if TYPE_CHECKING:
    from windlass.models.config import TransformerConfig

_USUAL_BALANCE_LOSS = 0.01
"""Factor for a dense model that gets experts. Source: Fedus et al. 2021, arXiv:2101.03961."""

_FIELDS = {
    "experts": "count",
    "experts_per_token": "per_token",
    "expert_ffn": "ffn",
    "shared_ffn": "shared_ffn",
    "norm_topk": "norm_topk",
    "capacity": "capacity",
    "balance_loss": "balance_loss",
    "balance_bias": "balance_bias",
    "expert_every": "every",
    "dense_layers": "dense_layers",
}
"""Field of `ExpertConfig` by the argument that changes it."""
_FRACTIONS = frozenset({"capacity", "balance_loss", "balance_bias"})
_ABSENT_AT_ZERO = frozenset({"capacity", "balance_bias", "shared_ffn"})

EXPERT_ARGUMENTS = tuple(_FIELDS)


def apply_expert_arguments(
    config: "TransformerConfig", arguments: Mapping[str, int | float], width: int
) -> ExpertConfig | None:
    """The experts of a model after some of their fields are changed.

    Inner widths keep their ratio to the width. `experts=0` makes the model dense, and 0 of a
    capacity, of a shared expert or of a balance leaves it out. A dense model that gets experts has
    some as wide as its feed-forward branch, and a balance loss.
    """
    if arguments.get("experts") == 0:
        return None
    experts = config.experts
    if experts is None:
        if "experts" not in arguments:
            return None
        balanced = {"balance_loss", "balance_bias"} & arguments.keys()
        loss = 0.0 if balanced else _USUAL_BALANCE_LOSS
        experts = ExpertConfig(count=1, ffn=config.ffn, balance_loss=loss)
    ratio = width / config.width
    shared = experts.shared_ffn
    experts = replace(
        experts,
        ffn=round(experts.ffn * ratio),
        shared_ffn=None if shared is None else round(shared * ratio),
    )
    changes = {_FIELDS[name]: _value(name, value) for name, value in arguments.items()}
    return replace(experts, **changes)  # type: ignore[arg-type]  # counts are whole


def _value(name: str, value: float) -> float | None:
    if name in _ABSENT_AT_ZERO and value == 0:
        return None
    if name in _FRACTIONS:
        return value
    return bool(value) if name == "norm_topk" else int(value)


def refuse_sparse_experts(config: "TransformerConfig", *, sparse: bool) -> None:
    """Refuses to make weights absent in a model with experts.

    Raises:
        ModelError: the model has experts and should be sparse.
    """
    if sparse and config.experts is not None:
        raise ModelError(
            f"`sparsity` is asked for, and `{config.name}` has experts, whose weights are all "
            "kept; leave out `sparsity`, or make the model dense (`model.experts=0`)"
        )


def unused_argument(
    config: "TransformerConfig", arguments: Mapping[str, int | float]
) -> str | None:
    """The first argument that is of experts, if the model has none; else None."""
    if config.experts is not None or "experts" in arguments:
        return None
    return next(iter(arguments), None)
