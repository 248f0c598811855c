"""Rules from the tensor plans that transformers' models publish (no torch here).

A configuration's `base_model_tp_plan` and a class's `_tp_plan` map patterns of module names to
styles. Source: huggingface.co/docs/transformers, "Tensor parallelism", versions 4.53 to 5.3.
"""

from collections.abc import Mapping

from windlass.errors import ModelError

_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "packed_colwise": "column in 2",
    "packed_rowwise": "row in 2",
    "embedding_rowwise": "vocabulary",
    "vocab_parallel_rowwise": "vocabulary",
}
_WHOLE = ("sequence_parallel", "replicated_with_grad_allreduce", "replicate")
"""Styles of modules that every slice has whole: what they find are contributions like any other."""
_GATHERED = ("colwise_rep", "colwise_gather_output")
"""Of the head, whose logits stay cut here; inside a layer a gather of features, which we lack."""


def published_rules(
    base: Mapping[str, str], head: Mapping[str, str], *, prefix: str = "model"
) -> dict[str, str]:
    """Rules as `read_cut` reads them, for a chain whose layers keep the model's own names.

    The module around columns and rows is their region.

    Args:
        base: `config.base_model_tp_plan`.
        head: the class's `_tp_plan`, of what stands on the base model.
        prefix: name of the base model within the class; empty if it is the model itself.

    Raises:
        ModelError: a style that has no counterpart here.
    """
    rules: dict[str, str] = {}
    unknown: list[str] = []
    for name, style in base.items():
        full = f"{prefix}.{name}" if prefix else name
        if style in _STYLES:
            rules[full] = _STYLES[style]
        elif style not in _WHOLE:
            unknown.append(f"`{name}` is `{style}`")
    for name, style in head.items():
        if style in _GATHERED:
            rules[name] = "vocabulary"
        elif style not in _WHOLE:
            unknown.append(f"`{name}` is `{style}`")
    if unknown:
        raise ModelError(
            f"this tensor plan cannot be followed: {', '.join(unknown)}; name the cuts yourself in "
            "`model.sharding_rules`, or leave the tensor degree at 1"
        )
    regions = {n.rpartition(".")[0]: "region" for n, w in rules.items() if w != "vocabulary"}
    return regions | rules
