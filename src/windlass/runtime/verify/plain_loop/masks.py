"""Masks of blocks that move, by the papers of SET and RigL and docs/reference/data-order.md."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.schema import SparsityRequest


class PlainMasks:
    """Computes block-sparse layers with dense weights, whose zeros have gradients: RigL's scores.

    Args:
        sparsity: which blocks are kept, and when that changes; None means a dense model.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        sparsity: SparsityRequest | None,
        *,
        seed: int,
        steps: int,
    ) -> None:
        self._sparsity, self._seed, self._steps = sparsity, seed, steps
        self._dense: list[tuple[str, Tensor]] = []
        self._scores: dict[str, Tensor] = {}
        self._modules: dict[str, Any] = {
            f"{name}.{path}": module
            for name, layer in layers
            for path, module in layer.named_modules()
            if "values" in dict(module.named_parameters(recurse=False))
            and "blocks" in dict(module.named_buffers(recurse=False))
        }
        for name, module in self._modules.items():
            module.forward = partial(self._linear, name, module)
            # A hook keeps the module's owner from computing it together with its neighbour.
            module.register_forward_hook(lambda *_: None)

    def end_micro_batch(self) -> None:
        """Adds the squared norms of the blocks of each dense gradient to the scores."""
        for name, dense in self._dense:
            module, gradient = self._modules[name], dense.grad
            if gradient is not None:
                blocks = gradient.view(
                    module.out_features // module.block, module.block, -1, module.block
                )
                squares = blocks.square().sum((1, 3))
                self._scores[name] = self._scores.get(name, 0.0) + squares
        self._dense.clear()

    @torch.no_grad()
    def end_step(self, step: int, state_of: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Replaces blocks after a step, if the schedule says so.

        Args:
            state_of: the tensors that belong to a weight beside itself.
        """
        share = plain_drop_share(self._sparsity, step, self._steps)
        for name, module in self._modules.items() if share else ():
            rows, columns = module.out_features // module.block, module.in_features // module.block
            scores = self._scores.get(name)
            if scores is None or (self._sparsity and self._sparsity.schedule == "set"):
                scores = _random_scores((rows, columns), f"{self._seed}/{name}.values/{step}")
            moved = _moved_blocks(module, scores, share)
            for slot, block in moved.items():
                module.blocks[slot] = torch.tensor(block)
                for tensor in (module.values, *state_of(module.values)):
                    tensor[slot] = 0
        self._scores.clear()

    def _linear(self, name: str, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        rows, columns = module.out_features // module.block, module.in_features // module.block
        grid = module.values.new_zeros(rows, columns, module.block, module.block)
        row, column = module.blocks.long().unbind(1)
        dense = grid.index_put((row, column), module.values).transpose(1, 2)
        dense = dense.reshape(module.out_features, module.in_features)
        if dense.requires_grad:
            dense.retain_grad()
            self._dense.append((name, dense))
        return functional.linear(x, dense, module.bias)


def plain_drop_share(sparsity: SparsityRequest | None, step: int, steps: int) -> float:
    """Share of kept blocks that are replaced after a step; 0 if the masks stay."""
    if sparsity is None or sparsity.schedule not in ("set", "rigl"):
        return 0.0
    end = sparsity.until * steps
    if step % sparsity.every or step >= end or step == steps:
        return 0.0
    return sparsity.drop * math.cos(math.pi * step / end / 2) ** 2


def _moved_blocks(module: Any, scores: Tensor, share: float) -> Mapping[int, tuple[int, int]]:  # noqa: ANN401
    """The places of the smallest blocks, each with the row and the column that it has now."""
    span = module.in_features // module.block // module.groups
    kept = [tuple(block) for block in module.blocks.tolist()]
    norms = [float(block.norm()) for block in module.values]
    cells = [(row, column // span) for row, column in kept]
    room = {cell: span - cells.count(cell) for cell in set(cells)}
    leaving: list[int] = []
    for slot in sorted(range(len(kept)), key=norms.__getitem__):
        if room[cells[slot]] and len(leaving) < round(share * len(kept)):
            room[cells[slot]] -= 1
            leaving.append(slot)
    moved = {}
    for cell in set(cells):
        slots = sorted(slot for slot in leaving if cells[slot] == cell)
        row, first = cell[0], cell[1] * span
        absent = [column for column in range(first, first + span) if (row, column) not in kept]
        absent.sort(key=lambda column: -float(scores[row, column]))
        for slot, column in zip(slots, sorted(absent[: len(slots)]), strict=True):
            moved[slot] = (row, column)
    return moved


def _random_scores(shape: tuple[int, int], key: str) -> Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.rand(*shape, generator=generator)
