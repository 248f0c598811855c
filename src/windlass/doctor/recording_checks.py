"""Checks of steps that are recorded once and replayed, as CUDA graphs do; a CPU records none."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.optim.adamw import adamw

from windlass.doctor.findings import (
    Finding,
    NotAvailableError,
    WorkerTask,
    WrongResultError,
    compare,
    shortest_seconds,
)
from windlass.jobs import load
from windlass.torch_ext import Device
from windlass.verify import run_isolated

_TOLERANCE = 1e-4
"""Largest relative error of sums of some hundreds of products in float32."""
_REPLAYS = 3
_STEPS = 8
"""Two that run unrecorded, one that is recorded, and five more replays."""


def require_recording(device: Device) -> None:
    """Ends a check on a device that records no work.

    Raises:
        NotAvailableError: torch has no graphs for it.
    """
    if not device.can_record:
        raise NotAvailableError(f"torch records no work of `{device.kind}`")


def recorded_work(device: Device) -> Finding:
    """Passes and fused updates of a layer, recorded once and replayed with other numbers."""
    require_recording(device)
    torch.manual_seed(0)
    start = torch.randn(64, 64)
    inputs = [torch.randn(8, 64) for _ in range(_REPLAYS)]

    def train(*, recorded: bool) -> tuple[Tensor, float]:
        step = _AdamWStep(device, start)
        step.run()  # kernels are loaded before they are recorded
        run: Callable[[], None] = step.run
        if recorded:
            run = device.record(step.run).replay
        for index, x in enumerate(inputs):
            device.to_device(x, into=step.x)
            step.rate.fill_(1e-2 / (index + 1))
            run()
        return step.weight.detach(), shortest_seconds(device, run)

    weight, seconds = train(recorded=True)
    expected, plain_seconds = train(recorded=False)
    # The timing has repeated the last step, equally often.
    error = compare({"the weight": (weight, expected)}, _TOLERANCE)
    return Finding(f"{seconds / plain_seconds:.2f} x the time of unrecorded work, {error}")


class _AdamWStep:
    """A step of one linear layer by the fused update, which reads its rate from the device."""

    def __init__(self, device: Device, start: Tensor) -> None:
        there = device.torch_device
        self.x = torch.zeros(8, len(start), device=there)
        self.weight = start.to(there).clone().requires_grad_()
        self.rate = torch.full((), 1e-2, device=there)
        self._moments = [torch.zeros_like(self.weight.detach()) for _ in range(2)]
        self._count = torch.zeros((), device=there)

    def run(self) -> None:
        """Submits the step."""
        loss = linear(self.x, self.weight).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.weight)
        with torch.no_grad():
            adamw(
                [self.weight], [gradient], [self._moments[0]], [self._moments[1]], [],
                [self._count], fused=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=self.rate,
                weight_decay=0.1, eps=1e-8, maximize=False,
            )  # fmt: skip


def recorded_run(task: WorkerTask, request: Sequence[str]) -> Finding:
    """A whole run whose steps are recorded, beside the same run kernel by kernel.

    Args:
        request: a small model and how it trains, with deterministic kernels.
    """
    require_recording(task.computes_on())
    return same_losses(task.folder, request, "step_graph=true")


def same_losses(folder: Path, request: Sequence[str], pin: str) -> Finding:
    """A run under a pin, beside one without it: losses and norms are the same bit for bit.

    Raises:
        WrongResultError: they differ.
    """
    plain, other = (
        _losses(folder / name, (*request, *pins))
        for name, pins in (("plain", ()), ("other", (pin,)))
    )
    for step, (expected, result) in enumerate(zip(plain, other, strict=True), 1):
        if result != expected:
            raise WrongResultError(
                f"step {step}: loss and norm are {result}, and {expected} without `{pin}`"
            )
    return Finding(f"equal to a run without it bit for bit: losses and norms of {_STEPS} steps")


def _losses(folder: Path, request: Sequence[str]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run in a process of its own."""
    run_isolated(
        "windlass", "train", *request, f"train.steps={_STEPS}",
        f"train.evaluate_every={_STEPS + 1}", f"train.save_every={_STEPS + 1}",
        "--folder", str(folder),
    )  # fmt: skip
    return [(step.loss, step.gradient_norm) for step in load(folder).steps]
