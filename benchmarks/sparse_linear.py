"""How much faster a linear layer of kept blocks is than a dense one: forward and both gradients.

    python benchmarks/sparse_linear.py [--shapes 768x3072 2048x8192] [--dtypes float32 bfloat16]
        [--blocks 64 128] [--levels 0.75 0.875] [--rounds 7] [--rivals] [--sparselab]

Each contestant runs once a round, in turn, as a training step calls it: one forward pass, and
gradients of inputs and weights by autograd; medians over rounds. A level that a shape does not
allow (two kept blocks a row at least, columns alike) is replaced by the nearest that it does. All
have the allocator of Windlass's runs. `--rivals` adds the fallback without a compiler, the narrower
dense layer of equal FLOP, and torch's sparse tensors; of these, BSR has no weight gradient, so it
stands beside the dense layer's other two products.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from results import append_row
from windlass.sparsity import BlockPart, BlockSparseLinear, block_loops, implementation
from windlass.torch_ext import install_allocator

TOKENS = 2048
Step = Callable[[], object]


class LoopOfMm(torch.autograd.Function):
    """The fallback without a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, blocks: Tensor, outputs: int) -> Tensor:  # noqa: ANN401
        """The product."""
        ctx.save_for_backward(x, values, blocks)
        return block_loops.linear(x, values, blocks, outputs, None)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        """Both gradients."""
        x, values, blocks = ctx.saved_tensors
        return (
            block_loops.input_grad(gy, values, blocks, x.shape[1]),
            block_loops.weight_grad(gy, x, blocks, values.shape[-1]),
            None,
            None,
        )


class Case:
    """One layer and level, with the steps of all contestants."""

    def __init__(
        self, inputs: int, outputs: int, block: int, kept: int, dtype: torch.dtype
    ) -> None:
        self.x = torch.randn(TOKENS, inputs).to(dtype).requires_grad_()
        self.gy = torch.randn(TOKENS, outputs).to(dtype)
        self.ideal = inputs / block / kept
        part = BlockPart(rows=outputs // block, kept=kept)
        self.sparse = BlockSparseLinear(inputs, outputs, bias=False, block=block, parts=(part,)).to(
            dtype
        )
        self.dense = nn.Linear(inputs, outputs, bias=False).to(dtype)
        self.narrow = nn.Linear(inputs, round(outputs / self.ideal), bias=False).to(dtype)

    def step(self, layer: Callable[[Tensor], Tensor], *weights: Tensor) -> Step:
        """One forward pass, and gradients of the input and the weights."""
        return lambda: torch.autograd.grad(layer(self.x), (self.x, *weights), self.gy)

    def steps(self) -> Iterator[tuple[str, Step]]:
        """The layer of kept blocks beside the dense one."""
        yield "dense", self.step(self.dense, self.dense.weight)
        yield "block_linear", self.step(self.sparse, self.sparse.values)

    def rivals(self) -> Iterator[tuple[str, Step]]:
        """Other ways to the same or as large a product."""
        sparse, rows = self.sparse, self.gy[:, : self.narrow.out_features].contiguous()
        yield (
            "narrower dense",
            lambda: torch.autograd.grad(self.narrow(self.x), (self.x, self.narrow.weight), rows),
        )
        outputs = sparse.out_features
        yield (
            "loop of mm",
            self.step(
                lambda x: LoopOfMm.apply(x, sparse.values, sparse.blocks, outputs), sparse.values
            ),
        )
        yield "dense, no weight gradient", self.step(self.dense)
        if self.x.dtype == torch.float32:
            yield "torch CSR", self.csr()
            yield "torch BSR, no weight gradient", self.bsr()

    def csr(self) -> Step:
        """Unstructured sparsity in torch's CSR, with as many weights."""
        keep = torch.rand_like(self.dense.weight) < 1 / self.ideal
        weight = (self.dense.weight.detach() * keep).to_sparse_csr().requires_grad_()
        return self.step(lambda x: torch.sparse.mm(weight, x.T).T, weight)

    def bsr(self) -> Step:
        """The same kept blocks in torch's BSR: the output and the input's gradient."""
        weight = self.sparse.dense_weight().detach()
        size = (self.sparse.block, self.sparse.block)
        forward, backward = weight.to_sparse_bsr(size), weight.T.contiguous().to_sparse_bsr(size)
        x, gy = self.x.detach(), self.gy
        return lambda: ((forward @ x.T).T, (backward @ gy.T).T)

    def sparselab(self) -> Step:
        """Unstructured sparsity in the layer of `sparselab`, with as many weights."""
        from sparselab import SparseLinear

        layer = SparseLinear(
            self.dense.in_features, self.dense.out_features, bias=False, sparsity=1 - 1 / self.ideal
        )
        return self.step(layer, *layer.parameters())


def kept_blocks(inputs: int, outputs: int, block: int, level: float) -> int | None:
    """Kept blocks a row nearest to a level; None if no count makes equal columns."""
    columns, rows = inputs // block, outputs // block
    legal = [kept for kept in range(2, columns) if rows * kept % columns == 0]
    return min(legal, key=lambda kept: abs(1 - kept / columns - level), default=None)


def seconds_of(steps: list[tuple[str, Step]], rounds: int) -> dict[str, list[float]]:
    """Time of each contestant in each round, after one that is not measured."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in steps}
    for index in range(rounds + 1):
        for name, step in steps:
            start = time.perf_counter()
            step()
            if index:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(case: Case, options: argparse.Namespace, row: dict[str, object]) -> None:
    """Measures one case, prints it and appends a row for each contestant."""
    steps = list(case.steps())
    if options.rivals:
        steps += case.rivals()
    if options.sparselab:
        steps.append(("sparselab", case.sparselab()))
    seconds = seconds_of(steps, options.rounds)
    for name, measured in seconds.items():
        other = "dense, no weight gradient" if name.endswith("no weight gradient") else "dense"
        ratios = [dense / own for dense, own in zip(seconds[other], measured, strict=True)]
        speedup = statistics.median(seconds[other]) / statistics.median(measured)
        append_row(
            "sparse_linear", **row, method=name, seconds=statistics.median(measured),
            speedup=speedup, lowest=min(ratios), highest=max(ratios), ideal=case.ideal,
            share_of_ideal=speedup / case.ideal, rounds=options.rounds,
        )  # fmt: skip
        print(
            f"{row['shape']:>11} {row['dtype']:8} {row['block']:4} {1 - 1 / case.ideal:6.3f} "
            f"{name:30} {1e3 * statistics.median(measured):9.1f} ms {speedup:6.2f} x "
            f"({min(ratios):.2f} to {max(ratios):.2f}) {speedup / case.ideal:6.3f} of ideal",
            flush=True,
        )


def main() -> None:
    """Reads the command line, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["768x3072", "2048x8192", "5120x20480"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--levels", nargs="+", type=float, default=[0.75, 0.875])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--sparselab", action="store_true")
    options = parser.parse_args()
    install_allocator()
    torch.manual_seed(0)
    measured = set()
    for shape, name, block, level in (
        (shape, name, block, level)
        for shape in options.shapes
        for name in options.dtypes
        for block in options.blocks
        for level in options.levels
    ):
        inputs, outputs = map(int, shape.split("x"))
        kept = kept_blocks(inputs, outputs, block, level)
        if kept is None or (shape, name, block, kept) in measured:
            continue
        measured.add((shape, name, block, kept))
        dtype = getattr(torch, name)
        compare(
            Case(inputs, outputs, block, kept, dtype),
            options,
            {
                "shape": shape, "tokens": TOKENS, "dtype": name, "block": block,
                "level": round(1 - kept * block / inputs, 4),
                "implementation": implementation(torch.device("cpu"), dtype),
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
