"""Training loops written by hand in plain PyTorch, as fast as we can make them.

They are what `in_memory.py` compares Windlass with. A `Rival` says which loop: its precision, its
attention, what it compiles, and where its memory comes from.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the field's name for it

from turns.contestants import Step
from windlass.models import IGNORE_INDEX
from windlass.models.build import build_layer_stack
from windlass.torch_ext import accelerator_device

GLIBC_HUGE_PAGES = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=17179869184",
        "glibc.malloc.trim_threshold=17179869184",
        "glibc.malloc.top_pad=268435456",
    )
)
"""One heap that never shrinks, in transparent huge pages."""

PAGES: dict[str, dict[str, str]] = {
    "plain": {},
    "thp": {"THP_MEM_ALLOC_ENABLE": "1"},
    "glibc": {"GLIBC_TUNABLES": GLIBC_HUGE_PAGES},
}
"""Environment variables of a process by where its memory comes from."""


class Rival(NamedTuple):
    """A plain loop, written as `precision-attention-code-pages`."""

    precision: Literal["float32", "autocast", "masters", "pure"]
    """`autocast`: float32 weights under bfloat16 autocast. `masters`: bfloat16 weights with float32
    masters, as Windlass has them. `pure`: bfloat16 weights and moments without masters."""
    attention: Literal["flash", "math"]
    code: Literal["eager", "whole", "step"]
    """What is compiled: nothing, model with loss, or the optimizer's step too."""
    pages: str
    """A key of `PAGES`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The rival called `text`, such as `autocast-math-whole-glibc`."""
        precision, attention, code, pages = text.split("-")
        return cls(precision, attention, code, pages)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "-".join(self)


class Task(NamedTuple):
    """What all contestants train."""

    model: str
    dials: tuple[str, ...]
    """Further words of a request, such as `model.layers=8`."""
    micro: int
    sequence: int
    accumulation: int = 1

    def batch(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """One micro-batch of random tokens and their targets, `[b s]` each.

        Targets are the successors; those of a BERT are 15 % of its own tokens, as it masks them.
        """
        generator = torch.Generator().manual_seed(0)
        shape = self.micro, self.sequence + 1
        window = torch.randint(0, vocabulary, shape, generator=generator)
        inputs = window[:, :-1].contiguous()
        if not self.model.startswith("bert"):
            return inputs, window[:, 1:].contiguous()
        targets = torch.full_like(inputs, IGNORE_INDEX)
        masked = round(0.15 * self.sequence)
        for row in range(self.micro):
            places = torch.randperm(self.sequence, generator=generator)[:masked]
            targets[row, places] = inputs[row, places]
        return inputs, targets


def plain_model(task: Task) -> tuple[nn.Sequential, int]:
    """The model as one plain module with its tied weights, and its vocabulary."""
    stack = build_layer_stack(task.model, model_dials(task), device="cpu", seed=0)
    model = nn.Sequential(*stack.layers)
    layers = dict(zip(stack.names, stack.layers, strict=True))
    for tied, owner in stack.tied_weights.items():
        (layer, _, name), (owner_layer, _, owner_name) = tied.partition("."), owner.partition(".")
        module, _, leaf = name.rpartition(".")
        weight = layers[owner_layer].get_parameter(owner_name)
        setattr(layers[layer].get_submodule(module), leaf, weight)
    return model, stack.vocabulary


def model_dials(task: Task) -> dict[str, int | float | str | bool]:
    """The dials of the task's model by name."""
    words = (word.removeprefix("model.").split("=") for word in task.dials)
    return {name: int(value) for name, value in words}


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as written by hand, softmax(Q K^T) V; maps `[b h s k]` to `[b h s k]`."""
    if attn_mask is not None:
        raise ValueError("the plain loops train on whole rows, without a mask of their own")
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        length = scores.shape[-1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value


def plain_loop(task: Task, rival: Rival) -> Step:
    """A loop that takes one step of AdamW, with clipping by the global norm, at each call.

    It computes on the machine's accelerator if it has one; where that has no bfloat16, in float16
    without a loss scale, which is as fast.
    """
    if rival.attention == "math":
        F.scaled_dot_product_attention = math_attention  # the layers look it up by this name
    device = accelerator_device()
    device.activate()
    half = torch.bfloat16 if device.has_bfloat16() else torch.float16
    model, vocabulary = plain_model(task)
    model.to(device.torch_device)
    inputs, targets = (part.to(device.torch_device) for part in task.batch(vocabulary))

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX)

    run = loss_of if rival.code == "eager" else torch.compile(loss_of, dynamic=False)
    update = _update(model, rival, half)
    autocast = rival.precision == "autocast"

    def step() -> float:
        for _ in range(task.accumulation):
            with torch.autocast(device.kind, half, enabled=autocast):
                loss = run(inputs, targets)
            (loss / task.accumulation).backward()
        update()
        device.synchronize()
        return loss.item()

    def figures() -> dict[str, float]:
        peak = device.peak_memory()
        device.reset_peak_memory()
        return {"peak_bytes": peak}

    step.figures = figures  # type: ignore[attr-defined]
    return step


def _update(model: nn.Module, rival: Rival, half: torch.dtype) -> Callable[[], None]:
    """Clips, updates and drops all gradients; compiled for `code` = step."""
    weights = list(model.parameters())
    masters = weights
    if rival.precision == "masters":
        masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
    if rival.precision in {"masters", "pure"}:
        model.to(half)
    compiled = rival.code == "step"
    rate = torch.tensor(1e-4) if compiled else 1e-4
    optimizer = torch.optim.AdamW(masters, lr=rate, fused=not compiled, foreach=None)

    def clip_and_step() -> None:
        if masters is not weights:
            for master, weight in zip(masters, weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if masters is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)

    run = torch.compile(clip_and_step, dynamic=False) if compiled else clip_and_step

    def update() -> None:
        run()
        for weight in (*masters, *weights):
            weight.grad = None

    return update
