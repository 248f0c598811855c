"""Measures the memory that torch allocates for one layer with real weights."""

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
class MeasuredMemory:
    """Bytes of one forward and backward pass, from torch's own profiler."""

    saved: int
    """Bytes still allocated after forward, without the output."""
    forward_peak: int
    backward_peak: int
    """Saved bytes and everything that backward allocated, parameter gradients included."""
    gradients: int
    """Bytes of parameter gradients."""


def measure_memory(
    stack: LayerStack,
    index: int,
    dtype: torch.dtype,
    *,
    micro_batch: int,
    sequence: int,
    compiled: bool,
    selective: bool = False,
    rows: int = 1,
    columns: int = 1,
) -> MeasuredMemory:
    """Measures a layer of a stack with real weights, full or sharded over `rows` x `columns`."""
    layer = stack.layers[index].to(dtype)
    run = runner(layer, loss=index == len(stack.layers) - 1, rows=rows)
    run = torch.compile(run) if compiled else run
    if selective:
        run = partial(checkpoint_selectively, run, preserve_rng=False)
    weights = dict(layer.named_parameters())
    x = make_input(stack, index, micro_batch, sequence // (rows if index else 1), dtype, columns)
    wanted = [*([x] if x.requires_grad else []), *weights.values()]
    for _ in range(2 if compiled else 0):  # compiles forward, then backward
        y = run(weights, x)
        torch.autograd.grad(y, wanted, torch.ones_like(y))
    (y, saved, forward_peak) = _allocations(lambda: run(weights, x))
    output_gradient = torch.ones_like(y)
    (gradients, _, backward_peak) = _allocations(
        lambda: torch.autograd.grad(y, wanted, output_gradient)
    )
    saved -= y.untyped_storage().nbytes()
    return MeasuredMemory(
        saved=saved,
        forward_peak=forward_peak,
        backward_peak=saved + backward_peak,
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
    stack: LayerStack,
    index: int,
    micro_batch: int,
    sequence: int,
    dtype: torch.dtype,
    columns: int = 1,
) -> Tensor:
    """Tokens for the first layer, random vectors of one column's features for any other."""
    if index == 0:
        return torch.randint(0, stack.vocabulary, (micro_batch, sequence))
    width = stack.layers[0].tokens.embedding_dim // columns
    return torch.randn(micro_batch, sequence, width, dtype=dtype, requires_grad=True)


def _allocations(run: Callable[[], Tensor]) -> tuple[Tensor, int, int]:
    """The result of `run`, the bytes allocated at its end, and their maximum."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, current, peak
