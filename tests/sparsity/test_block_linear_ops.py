"""The operator of kept blocks beside the dense product with a mask."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from windlass.errors import ModelError
from windlass.sparsity import (
    block_batches,
    block_kernels,
    block_linear,
    block_loops,
    implementation,
)
from windlass.sparsity.block_kernels import BlockKernels, load_block_kernels

FLOAT64_TOLERANCE = 1e-12
"""Both sum the same numbers in another order."""
FLOAT32_TOLERANCE = 2e-6
"""As a share of the largest result: a few roundings of 2^-24 in sums of up to 300 terms."""
BFLOAT16_TOLERANCE = 2**-7
"""As a share of the largest result: both round sums of float32 once, to 8 bits; the loop's may
fall on the other side of a rounding."""

LAYOUTS = ("random", "unsorted", "empty lines", "diagonal", "one block", "none", "all")


def layout(name: str, rows: int, columns: int) -> Tensor:
    """Kept blocks, `Int32[n 2]`."""
    draw = torch.Generator().manual_seed(7)
    every = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).int()
    if name == "all":
        return every
    if name == "none":
        return every[:0]
    if name == "one block":
        return every[columns + 1 : columns + 2]
    if name == "diagonal":
        return every[every[:, 0] % 2 == every[:, 1] % 2]
    kept = every[torch.rand(len(every), generator=draw) < 0.4]
    if name == "empty lines":
        return kept[(kept[:, 0] != 1) & (kept[:, 1] != 0)]
    return kept[torch.randperm(len(kept), generator=draw)] if name == "unsorted" else kept


def dense_weight(values: Tensor, blocks: Tensor, rows: int, columns: int) -> Tensor:
    block = values.shape[-1]
    grid = values.new_zeros(rows, columns, block, block)
    grid = grid.index_put((blocks[:, 0].long(), blocks[:, 1].long()), values)
    return grid.transpose(1, 2).reshape(rows * block, columns * block)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def largest_difference(result: Tensor, expected: Tensor) -> float:
    """Relative to the largest expected number."""
    if not expected.numel():
        return 0.0
    expected = expected.detach().double()
    scale = expected.abs().max().clamp_min(1e-300)
    return float((result.detach().double() - expected).abs().max() / scale)


@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_and_gradients_are_those_of_the_dense_weight_times_its_mask(name: str):
    torch.manual_seed(1)
    rows, columns, block = 6, 4, 16
    blocks = layout(name, rows, columns)
    x, values = draw(3, 5, columns * block), draw(len(blocks), block, block)
    bias, gy = draw(rows * block), draw(3, 5, rows * block)
    sparse = [tensor.clone().requires_grad_() for tensor in (x, values, bias)]
    dense = [tensor.clone().requires_grad_() for tensor in (x, values, bias)]

    y = block_linear(sparse[0], sparse[1], blocks, rows * block, sparse[2])
    weight = dense_weight(dense[1], blocks, rows, columns)
    expected = nn.functional.linear(dense[0], weight, dense[2])

    assert largest_difference(y, expected) <= FLOAT64_TOLERANCE
    for result, reference in zip(
        torch.autograd.grad(y, sparse, gy), torch.autograd.grad(expected, dense, gy), strict=True
    ):
        assert largest_difference(result, reference) <= FLOAT64_TOLERANCE


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 37, 600])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, FLOAT32_TOLERANCE), (torch.bfloat16, BFLOAT16_TOLERANCE)],
)
def test_compiled_products_equal_those_in_pytorch(
    name: str, tokens: int, dtype: torch.dtype, tolerance: float
):
    kernels = load_block_kernels()
    if not isinstance(kernels, BlockKernels) or dtype not in kernels.dtypes:
        pytest.skip("not compiled here")
    torch.manual_seed(2)
    for rows, columns, block in ((6, 4, 16), (3, 5, 32), (2, 3, 64)):
        blocks = layout(name, rows, columns)
        x, gy = draw(tokens, columns * block, dtype=dtype), draw(tokens, rows * block, dtype=dtype)
        values = draw(len(blocks), block, block, dtype=dtype)
        bias = draw(rows * block, dtype=dtype)
        wide = [tensor.double() for tensor in (x, gy, values, bias)]
        for result, expected in (
            (
                kernels.linear(x, values, blocks, rows * block, bias),
                block_loops.linear(wide[0], wide[2], blocks, rows * block, wide[3]),
            ),
            (
                kernels.input_grad(gy, values, blocks, columns * block),
                block_loops.input_grad(wide[1], wide[2], blocks, columns * block),
            ),
            (
                kernels.weight_grad(gy, x, blocks, block),
                block_loops.weight_grad(wide[1], wide[0], blocks, block),
            ),
        ):
            assert result.dtype == dtype
            assert largest_difference(result, expected) <= tolerance


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_products_of_gpus_equal_those_of_cpus(name: str):
    torch.manual_seed(3)
    rows, columns, block = 6, 4, 16
    blocks = layout(name, rows, columns)
    x, gy = draw(9, columns * block), draw(9, rows * block)
    values, bias = draw(len(blocks), block, block), draw(rows * block)
    for batches, loops in (
        (
            block_batches.linear(x, values, blocks, rows * block, bias),
            block_loops.linear(x, values, blocks, rows * block, bias),
        ),
        (
            block_batches.input_grad(gy, values, blocks, columns * block),
            block_loops.input_grad(gy, values, blocks, columns * block),
        ),
        (
            block_batches.weight_grad(gy, x, blocks, block),
            block_loops.weight_grad(gy, x, blocks, block),
        ),
    ):
        assert largest_difference(batches, loops) <= FLOAT64_TOLERANCE


def test_products_in_batches_ask_the_device_for_no_number():
    rows, columns, block, tokens = 6, 4, 16, 5
    blocks = layout("random", rows, columns)
    with FakeTensorMode() as mode:
        x, gy = torch.empty(tokens, columns * block), torch.empty(tokens, rows * block)
        fakes = torch.empty(len(blocks), block, block), mode.from_tensor(blocks)
        # A fake tensor has no numbers: what would read one raises.
        y = block_batches.linear(x, *fakes, rows * block, None)
        gx = block_batches.input_grad(gy, *fakes, columns * block)
        gw = block_batches.weight_grad(gy, x, fakes[1], block)
    assert (y.shape, gx.shape, gw.shape) == (gy.shape, x.shape, fakes[0].shape)


def test_results_are_the_same_bits_with_any_number_of_threads():
    torch.manual_seed(4)
    blocks = layout("random", 8, 8)
    x, values = draw(700, 256, dtype=torch.float32), draw(len(blocks), 32, 32, dtype=torch.float32)
    gy, threads, results = draw(700, 256, dtype=torch.float32), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaves = [x.clone().requires_grad_(), values.clone().requires_grad_()]
            y = block_linear(*leaves, blocks, 256)
            results.append((y, *torch.autograd.grad(y, leaves, gy)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Layer(nn.Module):
    def __init__(self, blocks: Tensor, rows: int) -> None:
        super().__init__()
        self.values = nn.Parameter(draw(len(blocks), 16, 16, dtype=torch.float32))
        self.bias = nn.Parameter(draw(rows * 16, dtype=torch.float32))
        self.register_buffer("blocks", blocks)

    def forward(self, x: Tensor) -> Tensor:
        return block_linear(x, self.values, self.blocks, len(self.bias), self.bias).relu()


def test_it_compiles_without_a_graph_break_and_takes_other_parameters():
    torch.manual_seed(5)
    layer = Layer(layout("random", 4, 4), 4)
    x = draw(2, 7, 64, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parameters = {name: (2 * value).detach() for name, value in layer.named_parameters()}

    eager = torch.autograd.grad(layer(x).sum(), tuple(layer.parameters()))
    graph = torch.autograd.grad(compiled(x).sum(), tuple(layer.parameters()))
    doubled = functional_call(layer, parameters, (x,))

    assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))
    assert torch.equal(doubled, 2 * layer(x))


def test_under_autocast_it_computes_in_bfloat16_as_dense_layers_do():
    layer = Layer(layout("random", 4, 4), 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(draw(3, 64, dtype=torch.float32))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.values.grad is not None
    assert layer.values.grad.dtype == torch.float32


def test_fake_tensors_have_the_shapes_of_real_ones():
    blocks = layout("random", 4, 3)
    x, values = draw(2, 5, 48), draw(len(blocks), 16, 16)
    for function, arguments in (
        (torch.ops.windlass.block_linear, (x, values, blocks, 64, None)),
        (torch.ops.windlass.block_linear_input_grad, (draw(2, 5, 64), values, blocks, 48)),
        (torch.ops.windlass.block_linear_weight_grad, (draw(2, 5, 64), x, blocks, 16)),
    ):
        real = function(*arguments)
        with FakeTensorMode() as mode:
            fake = function(
                *(
                    mode.from_tensor(argument) if isinstance(argument, Tensor) else argument
                    for argument in arguments
                )
            )
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


# torch 2.15's own check reads the gradient of a tensor that has none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_finds_nothing_wrong_with_the_operator():
    blocks = layout("random", 4, 3)
    arguments = (
        draw(2, 5, 48).requires_grad_(), draw(len(blocks), 16, 16).requires_grad_(), blocks, 64,
        draw(64).requires_grad_(),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.windlass.block_linear, arguments)


@pytest.mark.parametrize(
    ("x", "values", "blocks", "message"),
    [
        (draw(2, 40), draw(1, 16, 16), [[0, 0]], "do not divide a weight of 64 outputs and 40"),
        (draw(2, 48), draw(1, 16, 16), [[4, 0]], "1 of 1 blocks are outside of a weight of 4"),
        (draw(2, 48), draw(1, 16, 16), [[0, -1]], "the first at row 0, column -1"),
        (draw(2, 48).float(), draw(1, 16, 16), [[0, 0]], "torch.float32 cannot be multiplied"),
        (draw(2, 48).int(), draw(1, 16, 16).int(), [[0, 0]], "not in int32"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: Tensor, values: Tensor, blocks: list[list[int]], message: str
):
    with pytest.raises(ModelError, match=message):
        block_linear(x, values, torch.tensor(blocks, dtype=torch.int32), 64)


def test_blocks_outside_are_refused_by_compiled_code_too():
    blocks = torch.tensor([[0, 3]], dtype=torch.int32)
    with pytest.raises(ModelError, match="outside of a weight of 4 block rows and 3 block columns"):
        block_linear(draw(2, 48).float(), draw(1, 16, 16).float(), blocks, 64)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    block_kernels._load.cache_clear()
    yield
    block_kernels._load.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_goes_on_in_pytorch_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
):
    blocks = layout("random", 4, 3)
    x, values = draw(5, 48), draw(len(blocks), 16, 16)
    expected = block_linear(x, values, blocks, 64)
    results = [block_linear(x.float(), values.float(), blocks, 64) for _ in range(3)]

    assert all(largest_difference(y, expected) <= FLOAT32_TOLERANCE for y in results)
    (record,) = caplog.records
    assert "a loop of `mm` in PyTorch: `block_linear.cpp` cannot be built" in record.getMessage()
    assert "install one, such as g++" in implementation(torch.device("cpu"), torch.float32)


def test_it_says_which_implementation_runs():
    cpu = torch.device("cpu")
    kernels = load_block_kernels()
    if isinstance(kernels, BlockKernels):
        assert implementation(cpu, torch.float32) == "C++ on torch's brgemm kernels"
    assert implementation(cpu, torch.float64).startswith("a loop of `mm` in PyTorch: ")
    assert "no GPU has run" in implementation(torch.device("cuda"), torch.float32)
    with pytest.raises(ModelError, match="not in int8"):
        implementation(cpu, torch.int8)
