"""Turns tensors of a Hugging Face model into a parameter of ours, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.models.config import TransformerConfig
from windlass.models.huggingface.families import Layout, TensorRule


def join_tensors(tensors: Sequence[Tensor], rule: TensorRule, config: TransformerConfig) -> Tensor:
    """Our parameter, from the tensors that its rule names, in that order.

    Args:
        tensors: `[rows columns]` or `[rows]` each.
        rule: how they are joined.
        config: the model's sizes.
    """
    tensor = tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))
    if rule.layout is None:
        return tensor
    if rule.layout == "transposed":
        return tensor.t().contiguous()
    return tensor[_row_order(rule.layout, config)]


def split_tensor(
    parameter: Tensor, rule: TensorRule, config: TransformerConfig
) -> tuple[Tensor, ...]:
    """The tensors that a parameter of ours is written as; the inverse of `join_tensors`.

    Args:
        parameter: `[rows columns]` or `[rows]`; on the meta device only shapes are right.
        rule: how it is split, into queries, keys and values if the rule has several sources.
        config: the model's sizes.
    """
    if rule.layout == "transposed":
        parameter = parameter.t()
    elif rule.layout is not None and not parameter.is_meta:
        parameter = parameter[_row_order(rule.layout, config).argsort()]
    if len(rule.sources) == 1:
        return (parameter.contiguous(),)
    query, kv = config.heads * config.head_width, config.kv_heads * config.head_width
    return tuple(part.contiguous() for part in parameter.split((query, kv, kv)))


def _row_order(layout: Layout, config: TransformerConfig) -> Tensor:
    """For each row of queries, keys and values of ours, the row in which theirs has it."""
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_width
    rows = torch.arange((heads + 2 * kv_heads) * width)
    if layout == "qkv_of_each_head":
        return rows.view(heads, 3, width).transpose(0, 1).flatten()
    rotated = config.rotated_width
    feature = torch.arange(width)
    feature[:rotated] = feature[:rotated].view(-1, 2).t().flatten()
    by_head = rows.view(-1, width).clone()
    by_head[: heads + kv_heads] = by_head[: heads + kv_heads, feature]
    return by_head.flatten()
