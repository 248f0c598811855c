"""Changes the masks of sparse layers between two steps, as `set` and `rigl` schedules ask for.

A block that comes takes the place of one that goes, in the list of blocks and in the values, and
starts at zero with moments of zero. So no shape changes, and no code is compiled again. All ranks
that hold a weight decide from the same numbers, and so alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.models import LayerStack, TensorParallelRank, layer_sharding
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.optimizer_state.optimizer_state import master_dtype
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext
from windlass.schema import SparsityRequest
from windlass.sparsity import (
    BlockGrid,
    BlockSparseLinear,
    drop_share,
    mask_update,
    random_scores,
    updates_masks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SparseWeight:
    """A weight of kept blocks of one layer."""

    layer: int
    index: int
    """Index of its module among the sparse ones of the layer."""
    path: str
    """Path of its module inside the layer."""
    name: str
    """Full name of the values."""
    blocks: Tensor
    """Block row and block column of each kept block, `Int32[n 2]`; changed in place."""
    grid: BlockGrid
    block: int


def mask_updates(
    context: RankContext,
    store: ParamStore,
    templates: Sequence[LayerTemplate],
    groups: ProcessGroups | None,
) -> "MaskUpdates | None":
    """The updates of a rank's masks; None if they do not change between steps.

    Args:
        templates: one template per layer; for `rigl` they compute scores from now on.
    """
    sparsity = context.sparsity
    if sparsity is None or not sparsity.changes_masks:
        return None
    return MaskUpdates(context, sparsity, store, templates, groups)


class MaskUpdates:
    """The updates of the masks of all layers that one rank computes.

    Args:
        templates: one template per layer; for `rigl` they compute scores from now on.
    """

    def __init__(
        self,
        context: RankContext,
        sparsity: SparsityRequest,
        store: ParamStore,
        templates: Sequence[LayerTemplate],
        groups: ProcessGroups | None,
    ) -> None:
        self._stack, self._settings, self._sparsity = context.stack, context.settings, sparsity
        self._store, self._groups = store, groups
        self._templates = frozenset(templates)
        self._weights = tuple(_sparse_weights(context.stack, store))
        for template in self._templates if sparsity.schedule == "rigl" else ():
            template.score_blocks(context.device.torch_device, master_dtype(context.plan.precision))

    def begin_step(self, step: int) -> None:
        """Lets the backward passes of a step compute scores, if its update needs them."""
        active = updates_masks(self._sparsity, step, self._settings.steps)
        for template in self._templates:
            template.ask_for_scores(active=active)

    def end_step(self, step: int, scores: Mapping[int, Sequence[Tensor]]) -> None:
        """Changes the masks after a step, if the schedule says so.

        Args:
            scores: sums of this rank's scores, by layer, in the order of its sparse modules.
        """
        if not updates_masks(self._sparsity, step, self._settings.steps):
            return
        share = drop_share(self._sparsity, step, self._settings.steps)
        for weight in self._weights:
            if self._sparsity.schedule == "rigl":
                wanted = self._summed_scores(weight, scores[weight.layer][weight.index])
            else:
                wanted = random_scores(
                    weight.grid, seed=self._settings.seed, name=weight.name, step=step
                )
            self._update(weight, wanted, share)

    @torch.no_grad()
    def _update(self, weight: _SparseWeight, wanted: Tensor, share: float) -> None:
        norms = self._store.block_norms(weight.layer, weight.name)
        scores = wanted.to(norms.device)
        slots, blocks = mask_update(weight.blocks, norms, scores, weight.grid, share)
        weight.blocks[slots] = blocks
        self._store.reset_blocks(weight.layer, weight.name, slots)

    def _summed_scores(self, weight: _SparseWeight, local: Tensor) -> Tensor:
        """Scores of a whole weight over all samples, `Float[rows columns]`."""
        if self._groups is None:
            return local
        full = self._in_full_grid(weight, local, self._groups.tensor_parallel)
        self._groups.sum_over_stage(full)
        return full

    def _in_full_grid(
        self, weight: _SparseWeight, local: Tensor, rank: TensorParallelRank
    ) -> Tensor:
        """A tensor-parallel rank's scores where they belong in the weight; zero elsewhere."""
        rule = layer_sharding(self._stack, weight.layer).rules.get(weight.path)
        if rank.degree == 1 or rule is None:
            return local
        by_rows = rule.style == "column"
        features = weight.block * (weight.grid.rows if by_rows else weight.grid.columns)
        ranges = rule.ranges(features, rank.degree, rank.index)
        index = torch.cat([torch.arange(a, b, weight.block) for a, b in ranges]) // weight.block
        full = local.new_zeros(weight.grid.rows, weight.grid.columns)
        return full.index_copy_(0 if by_rows else 1, index.to(local.device), local)


def _sparse_weights(stack: LayerStack, store: ParamStore) -> Iterator[_SparseWeight]:
    """The sparse weights of all layers whose tensors this rank has, in order."""
    for index, parameters in enumerate(store.layers):
        for number, (path, module) in enumerate(sparse_modules(stack.layers[index])):
            name = f"{parameters.name}.{path}"
            if f"{name}.blocks" in parameters.persistent_buffers:
                yield _SparseWeight(
                    layer=index,
                    index=number,
                    path=path,
                    name=f"{name}.values",
                    blocks=parameters.persistent_buffers[f"{name}.blocks"],
                    grid=BlockGrid(
                        module.out_features // module.block,
                        module.in_features // module.block,
                        module.groups,
                    ),
                    block=module.block,
                )


def sparse_modules(layer: nn.Module) -> Iterator[tuple[str, BlockSparseLinear]]:
    """The modules of a layer whose weights are kept blocks, with their paths."""
    for path, module in layer.named_modules():
        if isinstance(module, BlockSparseLinear):
            yield path, module
