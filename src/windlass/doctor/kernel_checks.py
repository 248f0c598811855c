"""Checks of kernels on one device: each equals the same computation on the CPU in float64."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from windlass.doctor.findings import (
    Check,
    Finding,
    NotAvailableError,
    WorkerTask,
    WrongResultError,
    compare,
    shortest_seconds,
)
from windlass.doctor.recording_checks import recorded_work
from windlass.jobs import Progress
from windlass.models import build_layer_stack, fuse_loss
from windlass.schema import MomentFormat
from windlass.sparsity import BlockPart, BlockSparseLinear, implementation
from windlass.torch_ext import Device, MomentCodec, StoredMoment, install_allocator
from windlass.units import format_flop_rate

_TOLERANCES = {
    torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2,
}  # fmt: skip
"""Largest relative errors. Sums of some hundreds of products, each rounded to 53, 24 or 8 bits;
TF32, which keeps 11 bits, is off unless a plan asks for it."""
_BACKENDS = {
    "attention as torch chooses": None,
    "attention as plain products": SDPBackend.MATH,
    "flash attention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
}
_NO_KERNEL = ("No available kernel", "No viable backend")
"""torch's words where a backend does not exist for a device or for such sizes."""
_SIDE, _ACCELERATOR_SIDE = 1024, 4096
"""Side of the square product that is timed, on a CPU and on an accelerator."""
_SLOWER = 1.5
"""Times an eager layer from which a compiled one counts as slow."""
_UPDATE = "update torch, or its GPU driver: kernels of this version are wrong on this device"
_COMPILER = (
    "set `compile=false`, or repair the compiler (a C++ compiler for the CPU, Triton for a GPU)"
)


def kernel_checks(task: WorkerTask, _: Progress) -> tuple[Check, ...]:
    """Products, attention, kept blocks, the fused loss, the optimizer, and compiled code."""
    install_allocator()
    device = task.computes_on()
    device.activate()
    return (
        *(
            Check(f"products in {_name(dtype)}", partial(_product, device, dtype), _UPDATE)
            for dtype in _dtypes(device)
        ),
        *(
            Check(name, partial(_attention, device, backend), _UPDATE)
            for name, backend in _BACKENDS.items()
        ),
        *(
            Check(
                f"products of kept blocks in {_name(dtype)}",
                partial(_kept_blocks, device, dtype),
                "train dense, without `sparsity`, and report it",
            )
            for dtype in (torch.float32, torch.bfloat16)
        ),
        Check("loss fused with the head", partial(_fused_loss, device), "set `loss=plain`"),
        Check("fused AdamW", partial(_fused_adamw, device), _UPDATE),
        *(
            Check(f"moments in {moments}", partial(_moments, device, moments), "`moments=float32`")
            for moments in ("bfloat16", "int8")
        ),
        Check("compiled layer", partial(_compiled_layer, device), _COMPILER),
        Check("recorded work", partial(recorded_work, device), "leave `step_graph` out"),
    )


def _dtypes(device: Device) -> Iterator[torch.dtype]:
    for dtype in _TOLERANCES:
        if dtype != torch.float64 or device.has_float64:
            yield dtype


def _product(device: Device, dtype: torch.dtype) -> Finding:
    a, b = _random(256, 384), _random(384, 512)
    result = a.to(device.torch_device, dtype) @ b.to(device.torch_device, dtype)
    # The factors are rounded first, so that only the product's own error counts.
    error = compare(
        {"the product": (result, a.to(dtype).double() @ b.to(dtype).double())}, _TOLERANCES[dtype]
    )
    side = _ACCELERATOR_SIDE if device.is_asynchronous else _SIDE
    x = torch.ones(side, side, device=device.torch_device, dtype=dtype)
    seconds = shortest_seconds(device, lambda: x @ x)
    return Finding(f"{format_flop_rate(2 * side**3 / seconds)}, {error}")


def _attention(device: Device, backend: SDPBackend | None) -> Finding:
    dtype = torch.bfloat16
    inputs = [_random(2, 4, 128, 64).to(dtype) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns why a backend cannot be used
        try:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                results = _attend([x.to(device.torch_device) for x in inputs])
        except RuntimeError as error:
            if backend is not None and any(text in str(error) for text in _NO_KERNEL):
                raise NotAvailableError("torch has none for this device") from None
            raise
    with sdpa_kernel(SDPBackend.MATH):
        expected = _attend([x.double() for x in inputs])
    names = ("the output", *(f"the gradient of {each}" for each in ("queries", "keys", "values")))
    pairs = zip(results, expected, strict=True)
    return Finding(compare(dict(zip(names, pairs, strict=True)), _TOLERANCES[dtype]))


def _attend(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output of queries, keys and values, and their gradients for a fourth tensor."""
    query, key, value = (x.requires_grad_() for x in inputs[:3])
    output = scaled_dot_product_attention(query, key, value, is_causal=True)
    return [output, *torch.autograd.grad(output, (query, key, value), inputs[3])]


def _kept_blocks(device: Device, dtype: torch.dtype) -> Finding:
    layer = BlockSparseLinear(256, 384, bias=False, block=32, parts=(BlockPart(rows=12, kept=2),))
    layer = layer.to(dtype)
    x, gradient = _random(64, 256).to(dtype), _random(64, 384).to(dtype)
    exact_x, exact_weight = (
        tensor.detach().double().requires_grad_() for tensor in (x, layer.dense_weight())
    )
    expected = linear(exact_x, exact_weight)
    by_x, by_weight = torch.autograd.grad(expected, (exact_x, exact_weight), gradient.double())
    rows, columns = layer.blocks.long().unbind(1)
    layer = layer.to(device.torch_device)
    own_x = x.to(device.torch_device).requires_grad_()
    output = layer(own_x)
    own_by_x, by_values = torch.autograd.grad(
        output, (own_x, layer.values), gradient.to(device.torch_device)
    )
    error = compare(
        {
            "the output": (output, expected),
            "the gradient of the input": (own_by_x, by_x),
            "the gradient of the kept blocks": (
                by_values,
                by_weight.view(12, 32, 8, 32).transpose(1, 2)[rows, columns],
            ),
        },
        _TOLERANCES[dtype],
    )
    return Finding(f"{error}; {implementation(device.torch_device, dtype)}")


def _fused_loss(device: Device) -> Finding:
    head = nn.Linear(64, 500, bias=False)
    x, targets = _random(2, 96, 64).float(), torch.randint(500, (2, 96))
    exact_x, exact_weight = (
        tensor.detach().double().requires_grad_() for tensor in (x, head.weight)
    )
    expected = cross_entropy(linear(exact_x, exact_weight).flatten(0, 1), targets.flatten())
    by_x, by_weight = torch.autograd.grad(expected, (exact_x, exact_weight))
    name = fuse_loss(head)
    head.to(device.torch_device)
    head.register_buffer(name, targets.to(device.torch_device), persistent=False)
    own_x = x.to(device.torch_device).requires_grad_()
    loss = head(own_x)
    own_by_x, own_by_weight = torch.autograd.grad(loss, (own_x, head.weight))
    return Finding(
        compare(
            {
                "the loss": (loss, expected),
                "the gradient of the input": (own_by_x, by_x),
                "the gradient of the head": (own_by_weight, by_weight),
            },
            _TOLERANCES[torch.float32],
        )
    )


def _fused_adamw(device: Device) -> Finding:
    start, gradients = _random(3, 4096), [_random(3, 4096) for _ in range(3)]
    weights: list[Tensor] = []
    for place, fused in ((device.torch_device, True), (torch.device("cpu"), False)):
        weight = nn.Parameter(start.to(place, torch.float32 if fused else torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=fused)
        for gradient in gradients:
            weight.grad = gradient.to(weight)
            optimizer.step()
        weights.append(weight)
    result, expected = weights
    error = compare({"the weight": (result, expected)}, _TOLERANCES[torch.float32])
    return Finding(f"three updates, {error}")


def _moments(device: Device, moments: MomentFormat) -> Finding:
    first, second = _random(3000).float(), _random(3000).float().square()
    decoded: list[tuple[Tensor, Tensor]] = []
    for place in (torch.device("cpu"), device.torch_device):
        stored = tuple(StoredMoment.zeros(moments, which, (3000,), place) for which in (0, 1))
        pair = (stored[0], stored[1])
        codec = MomentCodec(place)
        codec.encode_all((first.to(place), second.to(place)), pair, seed=0, step=1, weight="weight")
        decoded.append(codec.decode_all(pair))
    differing = sum(
        int((own.cpu() != other).sum()) for own, other in zip(decoded[1], decoded[0], strict=True)
    )
    # A root that a device rounds otherwise may move an element to the code beside it.
    if differing > len(first) // 100:
        raise WrongResultError(f"{differing} of {2 * len(first)} moments differ from the CPU's")
    error = compare({"the first moment": (decoded[1][0], first)}, 0.02)
    return Finding(f"{differing} of {2 * len(first)} differ from the CPU's, {error}")


def _compiled_layer(device: Device) -> Finding:
    model = {"layers": 1, "width": 128, "heads": 4, "vocabulary": 257, "sequence": 128}
    stack = build_layer_stack("gpt-tiny", model, device="cpu")
    layer = stack.layers[1].to(device.torch_device)
    x, gradient = (_random(4, 128, 128).float().to(device.torch_device) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        compiled = torch.compile(layer)
        start = time.perf_counter()
        result = _forward_backward(compiled, layer, x, gradient)
        compile_seconds = time.perf_counter() - start
        expected = _forward_backward(layer, layer, x, gradient)
        pairs = {
            f"tensor {index}": pair for index, pair in enumerate(zip(result, expected, strict=True))
        }
        error = compare(pairs, _TOLERANCES[torch.float32])
        ratio = shortest_seconds(
            device, lambda: _forward_backward(compiled, layer, x, gradient)
        ) / (shortest_seconds(device, lambda: _forward_backward(layer, layer, x, gradient)))
    return Finding(
        f"{ratio:.2f} x the time of the eager one, compiled in {compile_seconds:.1f} s, {error}",
        slow=_COMPILER if ratio > _SLOWER else None,
    )


def _forward_backward(
    call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, gradient: Tensor
) -> list[Tensor]:
    """The output, and the gradients of the input and of all weights."""
    layer.eval()  # dropout would differ from call to call
    x = x.detach().requires_grad_()
    output = call(x)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], gradient)]


def _random(*shape: int) -> Tensor:
    """Normal numbers in float64 on the CPU, others at each call."""
    return torch.randn(*shape, dtype=torch.float64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
