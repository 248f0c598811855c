"""Runs one layer with real numbers and weighs what torch allocates meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from windlass.models.layer_stack import LayerStack
from windlass.models.loss import layer_loss
from windlass.models.selective_checkpoint import checkpoint_selectively


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Bytes of one forward and backward pass, seen by torch's own profiler."""

    kept: int
    """After forward, the output apart."""
    forward_peak: int
    backward_peak: int
    """What was kept and all that backward allocated, gradients of parameters included."""
    gradients: int
    """Of parameters."""


def weigh(
    chain: LayerStack,
    index: int,
    dtype: torch.dtype,
    *,
    micro: int,
    sequence: int,
    compiled: bool,
    selectively: bool = False,
    rows: int = 1,
    columns: int = 1,
) -> Weighed:
    """Weighs a layer of a chain that has real weights, or the twin of a slice of so many."""
    layer = chain.layers[index].to(dtype)
    run = runner(layer, loss=index == len(chain.layers) - 1, rows=rows)
    run = torch.compile(run) if compiled else run
    if selectively:
        run = partial(checkpoint_selectively, run, preserve_rng=False)
    weights = dict(layer.named_parameters())
    x = make_input(chain, index, micro, sequence // (rows if index else 1), dtype, columns)
    wanted = [*([x] if x.requires_grad else []), *weights.values()]
    for _ in range(2 if compiled else 0):  # compiles forward, then backward
        y = run(weights, x)
        torch.autograd.grad(y, wanted, torch.ones_like(y))
    (y, kept, forward_peak) = _allocations(lambda: run(weights, x))
    handed = torch.ones_like(y)
    (gradients, _, backward_peak) = _allocations(lambda: torch.autograd.grad(y, wanted, handed))
    kept -= y.untyped_storage().nbytes()
    return Weighed(
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=kept + backward_peak,
        gradients=sum(g.untyped_storage().nbytes() for g in gradients[x.requires_grad :]),
    )


def runner(
    layer: nn.Module, *, loss: bool, rows: int = 1
) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The layer as a function of its weights, with the loss on arbitrary targets."""

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        y = functional_call(layer, weights, (x,))
        if not loss:
            return y
        samples, tokens = x.shape[:2]
        return layer_loss(layer)(y, torch.zeros(samples, rows * tokens, dtype=torch.int64))

    return run


def make_input(
    chain: LayerStack, index: int, micro: int, sequence: int, dtype: torch.dtype, columns: int = 1
) -> Tensor:
    """Tokens for the first layer, random vectors of a column's features for any other."""
    if index == 0:
        return torch.randint(0, chain.vocabulary, (micro, sequence))
    width = chain.layers[0].tokens.embedding_dim // columns
    return torch.randn(micro, sequence, width, dtype=dtype, requires_grad=True)


def _allocations(run: Callable[[], Tensor]) -> tuple[Tensor, int, int]:
    """What it returns, the bytes still there at the end, and the most there ever were."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, now, peak
