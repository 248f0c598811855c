"""What a section that keeps its intermediate results out of memory saves, in time and in memory.

    python benchmarks/sections.py loss [--tokens 4096] [--vocabulary 50257] [--width 768]
    python benchmarks/sections.py feed-forward [--tokens 2048] [--width 768] [--block 64]

`loss`: a projection to the vocabulary with its cross-entropy, forward and backward, fused and
plain, beside torch's own `linear_cross_entropy` with an explicit chunk. `feed-forward`: two sparse
projections with a GELU between them, as a step of training. All contestants run in one process and
in turn; the time is the least process time of all rounds, the peak the most that tensors take
beyond the operands.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from results import append_row
from windlass.models.fused_loss.linear_cross_entropy import linear_cross_entropy
from windlass.models.fused_loss.sizes import FusedLossSizes
from windlass.models.loss import mean_cross_entropy
from windlass.sparsity.block_sparse_linear import BlockSparseLinear
from windlass.sparsity.feed_forward_section import block_feed_forward
from windlass.sparsity.levels import BlockPart
from windlass.torch_ext import allocator_stats, install_allocator

_Run = Callable[[], Tensor]


def measured(contestants: dict[str, _Run], rounds: int) -> dict[str, tuple[float, int]]:
    """The least seconds of process time and the most bytes of each contestant."""
    seconds = dict.fromkeys(contestants, float("inf"))
    peaks = dict.fromkeys(contestants, 0)
    for _ in range(rounds):
        for name, run in contestants.items():
            before = allocator_stats()
            if before is None:
                raise SystemExit("the allocator that counts memory cannot be built here")
            start = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - start)
            peak = allocator_stats().peak_allocated - before.allocated
            peaks[name] = max(peaks[name], peak)
    return {name: (seconds[name], peaks[name]) for name in contestants}


def loss_contestants(
    x: Tensor, weight: Tensor, targets: Tensor, *, torchs: bool
) -> dict[str, _Run]:
    """Ways to compute the loss and both gradients."""
    sizes = FusedLossSizes(*weight.shape, weight.element_size())

    def plain() -> Tensor:
        return mean_cross_entropy(functional.linear(x, weight), targets)

    def fused() -> Tensor:
        return linear_cross_entropy(x, weight, None, targets)

    def torchs_own() -> Tensor:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=sizes.rows, chunking_method=None)
        return functional.linear_cross_entropy(
            x.flatten(0, 1), weight, targets.flatten(), options=options
        )

    ways = {"plain": plain, "fused": fused} | ({"torch's chunks": torchs_own} if torchs else {})
    return {
        name: lambda way=way: torch.autograd.grad(way(), [x, weight])[1]
        for name, way in ways.items()
    }


def compare_losses(options: argparse.Namespace) -> None:
    """Prints and records time and peak memory of the loss."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    x = torch.randn(options.tokens // 512, 512, options.width).to(dtype).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.width) / 50).to(dtype).requires_grad_()
    targets = torch.randint(0, options.vocabulary, x.shape[:2])
    contestants = loss_contestants(x, weight, targets, torchs=options.torchs)
    found = measured(contestants, options.rounds)
    logits_bytes = 4 * options.tokens * options.vocabulary
    print(f"{options.dtype}: logits would take {logits_bytes / 2**20:.0f} MiB in float32")
    plain_seconds, plain_bytes = found["plain"]
    for name, (seconds, nbytes) in found.items():
        saved = (plain_bytes - nbytes) / logits_bytes
        print(
            f"{name:15} {seconds:6.2f} s, {seconds / plain_seconds:5.2f} x plain, peak "
            f"{nbytes / 2**20:6.0f} MiB, {100 * saved:4.0f} % of the logits less"
        )
        append_row(
            "fused_loss", tokens=options.tokens, vocabulary=options.vocabulary,
            width=options.width, dtype=options.dtype, way=name, seconds=round(seconds, 4),
            times_plain=round(seconds / plain_seconds, 3), peak_bytes=nbytes,
            logits_saved=round(saved, 3), rounds=options.rounds,
        )  # fmt: skip


def sparse_layers(options: argparse.Namespace, dtype: torch.dtype) -> list[BlockSparseLinear]:
    """Both projections of a feed-forward four times as wide inside."""
    width, inner, block = options.width, 4 * options.width, options.block
    density = 1 - options.level
    return [
        BlockSparseLinear(
            inputs, outputs, bias=True, block=block, std=0.02,
            parts=[BlockPart(outputs // block, round(inputs // block * density))],
        ).to(dtype)
        for inputs, outputs in ((width, inner), (inner, width))
    ]  # fmt: skip


def compare_feed_forwards(options: argparse.Namespace) -> None:
    """Prints and records time and peak memory of a sparse feed-forward, forward and backward."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    up, down = sparse_layers(options, dtype)
    x = torch.randn(options.tokens, options.width).to(dtype).requires_grad_()
    given = torch.ones_like(x)
    wanted = [x, *up.parameters(), *down.parameters()]

    def by_layer() -> Tensor:
        return down(functional.gelu(up(x)))

    def section() -> Tensor:
        y = block_feed_forward(x, up, down, approximate="none")
        if y is None:
            raise SystemExit("these layers do not run as a section")
        return y

    ways = {"layer by layer": by_layer, "section": section}
    steps = {
        f"{name}, step": lambda way=way: torch.autograd.grad(way(), wanted, given)[0]
        for name, way in ways.items()
    }

    def without_gradients(way: _Run) -> Tensor:
        with torch.no_grad():
            return way()

    forwards = {
        f"{name}, forward": lambda way=way: without_gradients(way) for name, way in ways.items()
    }
    found = measured(steps | forwards, options.rounds)
    for name, (seconds, nbytes) in found.items():
        reference = found[f"layer by layer, {name.rpartition(' ')[2]}"][0]
        print(
            f"{options.dtype} {options.width} x {4 * options.width}, level {options.level:g}, "
            f"block {options.block}: {name:23} {1e3 * seconds:7.1f} ms, "
            f"{reference / seconds:4.2f} x as fast, peak {nbytes / 2**20:5.0f} MiB"
        )
        append_row(
            "feed_forward_section", tokens=options.tokens, width=options.width,
            level=options.level, block=options.block, dtype=options.dtype, way=name,
            seconds=round(seconds, 5), speed=round(reference / seconds, 3), peak_bytes=nbytes,
            rounds=options.rounds,
        )  # fmt: skip


def main() -> None:
    """Reads the command line and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=("loss", "feed-forward"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--level", type=float, default=0.875)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchs", action="store_true")
    options = parser.parse_args()
    install_allocator()
    torch.set_num_threads(1)
    if options.section == "loss":
        options.tokens = options.tokens or 4096
        compare_losses(options)
    else:
        options.tokens = options.tokens or 2048
        compare_feed_forwards(options)


if __name__ == "__main__":
    main()
