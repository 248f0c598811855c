"""Finds the repeated blocks of a module."""

from collections.abc import Mapping

from torch import nn

from windlass.errors import ModelError
from windlass.models.inspection.shape_inference import LAYER_STACK_HINT

_RIVAL_SHARE = 0.5
"""A second list with at least this share of the first one's parameters is no part of an end."""


def find_blocks(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """The blocks of a module in order, by path: children of its largest list of like modules.

    Lists inside of blocks, such as experts, are no candidates.

    Raises:
        ModelError: it has no list of like modules, or several large ones.
    """
    lists: dict[str, Mapping[str, nn.Module]] = {}
    for path, inner in module.named_modules():
        is_inside = any(f"{path}.".startswith(f"{outer}.") for outer in lists)
        if not is_inside and _is_block_list(inner):
            prefix = f"{path}." if path else ""
            lists[path] = {f"{prefix}{key}": block for key, block in inner.named_children()}
    if not lists:
        raise ModelError(
            f"model `{name}` is a `{type(module).__name__}` without an `nn.ModuleList` or "
            f"`nn.Sequential` of two or more blocks of one class; {LAYER_STACK_HINT}"
        )
    largest, *rest = sorted(lists, key=lambda path: -_parameters(lists[path]))
    rivals = [
        p for p in rest if _parameters(lists[p]) >= _RIVAL_SHARE * _parameters(lists[largest])
    ]
    if rivals:
        found = " and ".join(f"`{path}`" for path in lists if path in (largest, *rivals))
        raise ModelError(
            f"model `{name}` has several lists of blocks, {found}, and a stack is one chain of "
            f"layers; {LAYER_STACK_HINT}"
        )
    return dict(lists[largest])


def _is_block_list(module: nn.Module) -> bool:
    """Whether a module is a list of two or more modules of one class, which have parameters."""
    blocks = list(module._modules.values())  # noqa: SLF001  a block may occur twice
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(blocks) > 1
        and len({type(block) for block in blocks}) == 1
        and all(block is not None and any(True for _ in block.parameters()) for block in blocks)
    )


def _parameters(blocks: Mapping[str, nn.Module]) -> int:
    return sum(weight.numel() for block in blocks.values() for weight in block.parameters())
