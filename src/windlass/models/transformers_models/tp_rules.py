"""The tensor-parallel rules of a model of transformers, from its own `base_model_tp_plan`.

Ranks hold their own tokens between regions here, and every gradient is the sum of what the ranks
contribute. So a style that says no more than that a gradient is summed needs no rule.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from windlass.models.layer_stack import LayerStack
from windlass.models.tensor_parallel.sharding_rules import ShardingRule

_STYLES: Mapping[str, str] = {"colwise": "column", "rowwise": "row"}
_SUMMED = "replicated_with_grad_allreduce"


def with_model_rules(stack: LayerStack, model: Any) -> LayerStack:  # noqa: ANN401
    """The stack with the rules of its model's own plan, or with why these cannot be taken.

    Rules of the request override them.

    Args:
        stack: the model's layers.
        model: a model of transformers.
    """
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    in_blocks = {
        f"{prefix}{key}": style
        for key, style in plan.items()
        if any(_matches(f"{prefix}{key}", stack.names[index]) for index in (1, -2))
    }
    if error := _error(type(model).__name__, in_blocks):
        return replace(stack, unshardable=error)
    rules: dict[str, ShardingRule] = {}
    head = getattr(model.config, "head_dim", None)
    head = head or model.config.hidden_size // model.config.num_attention_heads
    for pattern, style in in_blocks.items():
        region = pattern.rpartition(".")[0]
        rules[region] = ShardingRule(style="region")
        if style in _STYLES:
            unit = head if "attn" in region or "attention" in region else 1
            rules[pattern] = ShardingRule(style=_STYLES[style], unit=unit)  # type: ignore[arg-type]  # one of the table
    for layer, kind in ((0, nn.Embedding), (-1, nn.Linear)):
        rules |= _vocabulary(stack, layer, kind)
    return replace(stack, sharding_rules={**rules, **stack.sharding_rules})


def _error(name: str, styles: Mapping[str, str]) -> str | None:
    """Why a plan cannot be taken as it is; None if it can."""
    if not styles:
        return f"`{name}` has no `base_model_tp_plan` for its blocks"
    for pattern, style in styles.items():
        if style not in (*_STYLES, _SUMMED):
            return f"`{name}` shards `{pattern}` as `{style}`, which is not known here"
    regions = {pattern.rpartition(".")[0] for pattern in styles}
    ends = {pattern.rpartition(".")[0] for pattern, style in styles.items() if style == "rowwise"}
    if regions - ends:
        return f"`{name}` names no `rowwise` module for `{min(regions - ends)}`"
    return None


def _matches(pattern: str, layer: str) -> bool:
    """Whether a pattern is of modules in a layer."""
    parts, own = pattern.split("."), layer.split(".")
    return len(parts) > len(own) and all(
        part in ("*", name) for part, name in zip(parts, own, strict=False)
    )


def _vocabulary(stack: LayerStack, index: int, kind: type[nn.Module]) -> dict[str, ShardingRule]:
    """The rule of the first embedding, or the last linear, of a layer around the blocks."""
    layer, name = stack.layers[index], stack.names[index]
    found = [path for path, module in layer.named_modules() if type(module) is kind]
    if not found:
        return {name: ShardingRule(style="tokenwise")} if index else {}
    path = found[index]
    return {f"{name}.{path}" if path else name: ShardingRule(style="vocabulary")}
