"""Cuts a module into layers: it runs once on fake tensors, and its code runs around each block.

What blocks take beside the hidden state must depend on positions alone: it is made anew in each
layer, by the module's own code. A block that takes the hidden state alone is a layer as it is.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.init_weights import parameters_and_buffers
from windlass.models.inspection.layer_kinds import same_modules
from windlass.models.tracing.block_list import find_blocks
from windlass.models.tracing.model_call import End, ModelCall
from windlass.models.tracing.module_run import ModuleRun
from windlass.models.tracing.skeleton import BlockInSkeleton, Skeleton

_TARGETS = ("targets", "target", "labels", "label")
"""Names by which the forward pass of a model takes targets."""


def cut_module(
    module: nn.Module,
    name: str,
    *,
    call: ModelCall | None = None,
    examples: tuple[int, ...] | None = None,
) -> tuple[tuple[str, nn.Module], ...]:
    """A module's layers: from its input to the first block, the blocks, and the rest.

    If the module has real weights, the layers are proved equal to it: logits and gradients.

    Args:
        module: a module with a list of blocks, on any device; it is not changed.
        call: how it is called; None finds it in the signature of its forward pass.
        examples: shape of one input that is no token, if no call is given.

    Returns:
        The layers with their names. They share the module's parameters.

    Raises:
        ModelError: what stands in the way.
    """
    blocks = find_blocks(module, name)
    if call is not None:
        return _cut(module, name, blocks, call, None)
    targets, is_needed = _targets(module, name)
    plain = ModelCall(examples=examples, by_token=examples is None)
    calls = [] if is_needed else [plain]
    # Many models give all logits only beside a loss.
    calls += [] if targets is None else [replace(plain, targets=targets)]
    for each in calls:
        try:
            return _cut(module, name, blocks, each, targets)
        except ModelError as error:
            reason = error
    raise reason


def _cut(
    module: nn.Module,
    name: str,
    blocks: Mapping[str, nn.Module],
    call: ModelCall,
    targets: str | None,
) -> tuple[tuple[str, nn.Module], ...]:
    with module_mode(module, training=True):
        run = ModuleRun(module, name, blocks, call)
        skeleton = run.skeleton()
    skeleton.train(module.training)
    layers = (
        *_end(module, skeleton, run.before, Embeddings),
        *_blocks(blocks, skeleton, run, call),
        *_end(module, skeleton, run.after, Head),
    )
    if call.examples is None:
        prove_layers(module, name, layers, call=call, targets=targets, logits=run.logits)
    return layers


def _targets(module: nn.Module, name: str) -> tuple[str | None, bool]:
    """The argument of a forward pass that takes targets, if it has one, and whether it needs it."""
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(module.forward).parameters.values())
    others = {p.name: p.default is p.empty for p in parameters[1:] if p.kind in keywords}
    found = next((target for target in _TARGETS if target in others), None)
    needed = [each for each, is_needed in others.items() if is_needed and each != found]
    if needed or not parameters:
        raise ModelError(
            f"the forward pass of model `{name}` needs {', '.join(f'`{n}`' for n in needed)} "
            "beside tokens; give it a default"
            if needed
            else f"the forward pass of model `{name}` takes no tokens"
        )
    return found, found is not None and others[found]


class EndLayer(nn.Module):
    """The modules and weights before the blocks or after them, run by the module's own code."""

    def __init__(self, module: nn.Module, skeleton: Skeleton, end: End) -> None:
        super().__init__()
        self.skeleton, self.end, self.training = (skeleton,), end, module.training
        for path in end.modules:
            self._owner(path).add_module(path.rpartition(".")[2], module.get_submodule(path))
        for path in end.tensors:
            owner, _, leaf = path.rpartition(".")
            tensor = getattr(module.get_submodule(owner), leaf)
            if isinstance(tensor, nn.Parameter):
                self._owner(path).register_parameter(leaf, tensor)
            else:
                self._owner(path).register_buffer(leaf, tensor)

    def train(self, mode: bool = True) -> "EndLayer":
        """Puts the code around the blocks into the mode, too."""
        self.skeleton[0].train(mode)
        return super().train(mode)

    def _owner(self, path: str) -> nn.Module:
        owner: nn.Module = self
        for part in path.split(".")[:-1]:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner

    def _parts(self) -> dict[str, nn.Module | Tensor]:
        """The modules and weights by their path in the module."""
        tensors = {}
        for path in self.end.tensors:
            owner, _, leaf = path.rpartition(".")
            tensors[path] = getattr(self.get_submodule(owner), leaf)
        return {path: self.get_submodule(path) for path in self.end.modules} | tensors

    def _chain(self, x: Tensor) -> Tensor:
        for path in self.end.modules:
            x = self.get_submodule(path)(x)
        return x


class Embeddings(EndLayer):
    """What comes before the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps the input to `[b s d]`."""
        return self._chain(x) if self.end.chain else self.skeleton[0].first_hidden(self._parts(), x)


class Head(EndLayer):
    """What comes after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to the logits."""
        return self._chain(x) if self.end.chain else self.skeleton[0].outputs(self._parts(), x)


def _end(
    module: nn.Module, skeleton: Skeleton, end: End, kind: type[EndLayer]
) -> Iterator[tuple[str, nn.Module]]:
    """The layer before or after the blocks: a single module where that does it all."""
    if end.chain and len(end.modules) == 1:
        yield end.modules[0], module.get_submodule(end.modules[0])
    elif end.modules or end.tensors:
        yield kind.__name__.lower(), kind(module, skeleton, end)


def _blocks(
    blocks: Mapping[str, nn.Module], skeleton: Skeleton, run: ModuleRun, call: ModelCall
) -> Iterator[tuple[str, nn.Module]]:
    """The blocks as layers; those that compute the same run in the slot of the first of them."""
    first: list[tuple[object, int, nn.Module]] = []
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for index, (path, block) in enumerate(blocks.items()):
        if run.is_alone(path):
            yield path, block
            continue
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
        own_settings = {"index": place, "token_ranks": 1, "plan_rules": {}}
        vars(layer).update(vars(block), skeleton=(skeleton,), **own_settings)
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


_TOKENS = (2, 3)
"""Batch and sequence of the tokens, other than in the trace."""
_MOST_PARAMETERS = 500_000_000
"""Larger models are not run twice before they are trained."""
_ROUNDING = 100
"""Differences in units of rounding, as a share of the largest number, that other orders of sums
leave."""
_LOSS_TOLERANCE = 1e-3
"""Relative difference of two losses that shows another formula; rounding leaves less."""


def prove_layers(
    module: nn.Module,
    name: str,
    layers: Sequence[tuple[str, nn.Module]],
    *,
    call: ModelCall,
    targets: str | None,
    logits: int,
) -> None:
    """Compares logits and gradients of layers with those of their module, on random tokens.

    Nothing is done for a module on the meta device, or one of more than 500 M parameters.

    Args:
        targets: name of the argument of its forward pass that takes targets, if it has one.
        logits: which of the leaves of its output are the logits.

    Raises:
        ModelError: they differ, or the module's loss is another than mean cross-entropy.
    """
    tensors = list(parameters_and_buffers(module))
    count = sum(tensor.numel() for tensor in tensors)
    if count > _MOST_PARAMETERS or any(tensor.is_meta for tensor in tensors):
        return
    with contextlib.ExitStack() as modes, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for each in (module, *(layer for _, layer in layers)):
            modes.enter_context(module_mode(each, training=False))
        torch.manual_seed(0)
        tokens = torch.zeros(_TOKENS, dtype=torch.int64, device=tensors[0].device)
        beside = {} if call.targets is None else {call.targets: tokens}
        entries = tree_leaves(module(tokens, **beside))[logits].shape[-1]
        tokens.random_(entries)
        beside = {key: torch.randint_like(tokens, entries) for key in beside}
        whole, cut = tree_leaves(module(tokens, **beside))[logits], _run(layers, tokens)
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        direction = torch.randn_like(whole)
        for what, ours, theirs in (
            ("logits", [cut.detach()], [whole.detach()]),
            ("gradients", _gradients(cut, weights, direction),
             _gradients(whole, weights, direction)),
        ):  # fmt: skip
            difference = _difference(ours, theirs)
            if not difference <= _ROUNDING * torch.finfo(whole.dtype).eps:
                raise ModelError(
                    f"model `{name}` cannot be taken apart: the {what} of its layers differ from "
                    f"its own by {difference:.2g} of the largest; its code does more than one "
                    "run shows, such as keeping values from call to call"
                )
        if targets is not None:
            _check_loss(module, name, tokens, whole, targets)


@contextlib.contextmanager
def module_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Puts a module into training or evaluation mode for the block."""
    modes = [(inner, inner.training) for inner in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        # What a layer keeps beside its modules hears of it, too.
        module.train(modes[0][1])
        for inner, mode in modes:
            inner.training = mode


def _run(layers: Sequence[tuple[str, nn.Module]], x: Tensor) -> Tensor:
    for _, layer in layers:
        x = layer(x)
    return x


def _is_loss(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()


def _check_loss(module: nn.Module, name: str, tokens: Tensor, logits: Tensor, targets: str) -> None:
    """Refuses a module that computes another loss of targets than Windlass would."""
    values = torch.randint_like(tokens, logits.shape[-1])
    with torch.no_grad():
        losses = filter(_is_loss, tree_leaves(module(tokens, **{targets: values})))
    for loss in losses:
        mean = functional.cross_entropy(logits.flatten(0, 1).float(), values.flatten())
        if not abs(loss.item() - mean.item()) <= _LOSS_TOLERANCE * abs(mean.item()):
            raise ModelError(
                f"model `{name}` computes a loss of its own: {loss.item():.4g} where mean "
                f"cross-entropy is {mean.item():.4g}; give it the same, or none, and pass your "
                "loss as in `windlass.train(module, loss=...)`"
            )


def _gradients(output: Tensor, weights: Sequence[nn.Parameter], direction: Tensor) -> list[Tensor]:
    """Gradients of `sum(output * direction)`; zero for weights that it does not depend on."""
    found = torch.autograd.grad(output, weights, direction, allow_unused=True)
    return [
        torch.zeros_like(weight) if gradient is None else gradient
        for gradient, weight in zip(found, weights, strict=True)
    ]


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference as a share of the largest number."""
    largest = max(float(tensor.abs().max()) for tensor in theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs) / (largest or 1.0)
