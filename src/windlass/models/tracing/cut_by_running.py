"""Cuts a module whose code cannot be traced: it runs once, and its code runs around each block.

What blocks take beside the hidden state must depend on positions alone: it is made anew in each
layer, by the module's own code.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from windlass.models.inspection.layer_kinds import same_modules
from windlass.models.tracing.module_run import ModelCall, ModuleRun
from windlass.models.tracing.prove_layers import prove_layers
from windlass.models.tracing.skeleton import BlockInSkeleton, Skeleton

_BEFORE, _AFTER = "embeddings", "head"
"""Names of the layers around the blocks, if they are no single module."""


def cut_by_running(
    module: nn.Module, name: str, blocks: Mapping[str, nn.Module], call: ModelCall
) -> tuple[tuple[str, nn.Module], ...]:
    """A module's layers: from its input to the first block, the blocks, and the rest.

    Args:
        module: a module with blocks, on any device, whose buffers outside of the blocks are real.
        name: its name in messages.
        blocks: its blocks by path, in order.
        call: how it is called.

    Returns:
        The layers with their names. They share the module's parameters.

    Raises:
        ModelError: what stands in the way.
    """
    run = ModuleRun(module, name, blocks, call)
    skeleton = run.skeleton()
    before = run.single_before or (_BEFORE, EndLayer(module, skeleton, run.before, is_first=True))
    after = run.single_after or (_AFTER, EndLayer(module, skeleton, run.after, is_first=False))
    layers = (before, *_blocks(blocks, skeleton, run, call), after)
    if call.examples is None:
        prove_layers(module, name, layers, targets=None, logits=run.logits)
    return layers


class EndLayer(nn.Module):
    """The modules before the blocks or after them, run by the module's own code."""

    def __init__(
        self, module: nn.Module, skeleton: Skeleton, paths: tuple[str, ...], *, is_first: bool
    ) -> None:
        super().__init__()
        self.skeleton, self.paths, self.is_first = (skeleton,), paths, is_first
        for path in paths:
            *owners, leaf = path.split(".")
            owner: nn.Module = self
            for part in owners:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(leaf, module.get_submodule(path))

    def forward(self, x: Tensor) -> Tensor:
        """Maps the input to `[b s d]`, or `[b s d]` to the logits."""
        modules = {path: self.get_submodule(path) for path in self.paths}
        if self.is_first:
            return self.skeleton[0].first_hidden(modules, x)
        return self.skeleton[0].outputs(modules, x)


def _blocks(
    blocks: Mapping[str, nn.Module], skeleton: Skeleton, run: ModuleRun, call: ModelCall
) -> Iterator[tuple[str, nn.Module]]:
    """The blocks as layers; those that compute the same run in the slot of the first of them."""
    first: list[tuple[object, int, nn.Module]] = []
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for index, (path, block) in enumerate(blocks.items()):
        settings = {key: values[index] for key, values in call.per_layer.items()}
        code = (run.log(path), settings)
        place = next(
            (place for key, place, twin in first
             if key == code and _takes_place(block, index, twin, place)),
            None,
        )  # fmt: skip
        if place is None:
            first.append((code, index, block))
            place = index
        own = type(block)
        if own not in classes:
            classes[own] = type(own.__name__, (BlockInSkeleton, own), {})
        layer = nn.Module.__new__(classes[own])
        vars(layer).update(vars(block), skeleton=(skeleton,), index=place, token_ranks=1)
        yield path, layer


def _takes_place(block: nn.Module, index: int, twin: nn.Module, place: int) -> bool:
    """Whether a block is like another one but for its index, which becomes the other's."""
    changed = []
    for inner, other in zip(block.modules(), twin.modules(), strict=False):
        for key, value in vars(inner).items():
            if type(value) is int and value == index and vars(other).get(key) == place:
                changed.append((inner, key))
    for inner, key in changed:
        setattr(inner, key, place)
    if same_modules(block, twin):
        return True
    for inner, key in changed:
        setattr(inner, key, index)
    return False
