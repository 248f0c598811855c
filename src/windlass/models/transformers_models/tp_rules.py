"""The tensor-parallel rules of a model of transformers, from its own `base_model_tp_plan`.

Ranks hold their own tokens between regions here, and every gradient is the sum of what the ranks
contribute. So a style that says no more than that a gradient is summed needs no rule.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from windlass.models.layer_stack import LayerStack
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, ShardingStyle
from windlass.models.tracing.skeleton import BlockInSkeleton

_STYLES: Mapping[str, tuple[ShardingStyle, tuple[int, ...], bool]] = {
    "colwise": ("column", (1,), False),
    "rowwise": ("row", (1,), False),
    "colwise_gather_output": ("column", (1,), True),
    "rowwise_split_input": ("row", (1,), True),
    "packed_colwise": ("column", (1, 1), False),
    "packed_rowwise": ("row", (1, 1), False),
}
"""Our style, the fused parts, and whether what surrounds the module has all features."""
_NO_RULE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "moe_tp_experts")
"""Styles of modules whose weights every rank has, and of those whose weights have their own."""


def with_model_rules(stack: LayerStack, model: Any) -> LayerStack:  # noqa: ANN401
    """The stack with the rules of its model's own plan, or with why these cannot be taken.

    Rules of the request override them.

    Args:
        stack: the model's layers, whose blocks are told their rules.
    """
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    head = getattr(model.config, "head_dim", None)
    head = head or model.config.hidden_size // model.config.num_attention_heads
    blocks = list(zip(stack.names, stack.layers, strict=True))[1:-1]
    styles = [
        {path: style for key, style in plan.items()
         for path in [_path_in(f"{prefix}{key}", name)] if path and _owner(layer, path)}
        for name, layer in blocks
    ]  # fmt: skip
    error = None if any(styles) else f"`{type(model).__name__}` has no `base_model_tp_plan` for its"
    error = f"{error} blocks" if error else next(filter(None, map(_error, blocks, styles)), None)
    if error is not None:
        return replace(stack, unshardable=error)
    for (_, layer), of_layer in zip(blocks, styles, strict=True):
        if isinstance(layer, BlockInSkeleton):
            vars(layer)["plan_rules"] = _rules(layer, of_layer, head)
    ends = _vocabulary(stack, 0, nn.Embedding)
    if stack.tied_weights and not ends:
        ends = {stack.names[-1]: ShardingRule(style="tokenwise")}
    else:
        ends |= _vocabulary(stack, -1, nn.Linear)
    return replace(stack, sharding_rules={**ends, **stack.sharding_rules})


def _rules(block: nn.Module, styles: Mapping[str, str], head: int) -> dict[str, ShardingRule]:
    """The rules of one block, by path in it.

    Args:
        styles: those of its modules and weights in the model's plan, by path in it.
    """
    rules: dict[str, ShardingRule] = {}
    for name, child in block.named_children():
        inside = {path: styles[path] for path in styles if path.startswith(f"{name}.")}
        if not inside and all(weight.ndim < 2 for weight in child.parameters()):
            continue  # a norm computes each token by itself
        sharded: dict[str, ShardingRule] = {}
        for path, style in inside.items():
            if style not in _STYLES:
                continue
            own, parts, is_apart = _STYLES[style]
            owner, _, leaf = path.rpartition(".")
            if path in dict(block.named_parameters()):
                dim = 1 if (own == "column") != block.get_submodule(owner).is_transposed else 2
                before = sharded[owner].weights if owner in sharded else ()
                weights = (*before, (leaf, dim, parts))
                sharded[owner] = ShardingRule(style="experts", weights=weights)
            else:
                unit = head if "att" in name and not is_apart else 1
                sharded[path] = ShardingRule(style=own, parts=parts, unit=unit, is_apart=is_apart)
        # What a rank gives is a partial sum if no more than linears is in it, the last one shared.
        kinds = [rule.style for rule in sharded.values()]
        is_partial = kinds.count("row") == 1 and "experts" not in kinds
        is_partial &= not [*child.parameters(recurse=False)]
        rules |= {name: ShardingRule(style="region" if is_partial else "whole"), **sharded}
    return rules


def _error(block: tuple[str, nn.Module], styles: Mapping[str, str]) -> str | None:
    """Why a plan cannot be taken for a block; None if it can."""
    name, layer = block
    for path, style in styles.items():
        owner = layer.get_submodule(path.rpartition(".")[0])
        if style not in (*_STYLES, *_NO_RULE):
            return f"its own plan shards `{name}.{path}` as `{style}`, which is not known here"
        if "." not in path:
            return f"its own plan shards `{name}.{path}`, which is in no module of the block"
        is_weight = path in dict(layer.named_parameters())
        if is_weight and (getattr(owner, "has_bias", True) or owner.has_post_expert_norm):
            return f"`{name}.{path}` of its own plan is no weight of experts without biases alone"
    listed = (nn.ModuleList, nn.ModuleDict)
    bare = [key for key, child in layer.named_children() if isinstance(child, listed)]
    return f"`{name}.{bare[0]}` is a list of modules" if bare else None


def _owner(layer: nn.Module, path: str) -> bool:
    """Whether a block has a module or a weight at a path."""
    return path in dict(layer.named_modules()) or path in dict(layer.named_parameters())


def _path_in(pattern: str, layer: str) -> str | None:
    """The path in a layer that a pattern names; None if it names none."""
    parts, own = pattern.split("."), layer.split(".")
    is_inside = len(parts) > len(own) and all(
        part in ("*", name) for part, name in zip(parts, own, strict=False)
    )
    return ".".join(parts[len(own) :]) if is_inside else None


def _vocabulary(stack: LayerStack, index: int, kind: type[nn.Module]) -> dict[str, ShardingRule]:
    """The rule of the first embedding, or the last linear, of a layer around the blocks."""
    layer, name = stack.layers[index], stack.names[index]
    found = [path for path, module in layer.named_modules() if type(module) is kind]
    if not found:
        return {name: ShardingRule(style="tokenwise")} if index else {}
    path = found[index]
    return {f"{name}.{path}" if path else name: ShardingRule(style="vocabulary")}
