"""Proves that the layers of a module compute what the module computes."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from windlass.errors import ModelError
from windlass.models.init_weights import parameters_and_buffers
from windlass.models.tracing.model_call import ModelCall

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
        module: the module, which is run without dropout.
        layers: its layers with their names, which share its parameters.
        call: how it is called.
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
