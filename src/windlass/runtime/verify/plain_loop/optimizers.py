"""Every optimizer as one would write it in plain PyTorch, to compare a run with.

They are torch's own where torch has them, and else the formulas of their papers, weight by weight.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from windlass.schema import TrainSettings

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them."""


def plain_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: TrainSettings,
    *,
    hidden: Iterable[nn.Parameter] = (),
    names: Mapping[int, str] | None = None,
    joined: Mapping[str, Sequence[int]] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a run; each step's learning rate times `factor` is to be set in its groups.

    Args:
        names: full name of each weight by its `id`; None if no group of the settings needs them.
        joined: rows of each matrix in a weight that is several, by its full name; None if none is.
    """
    groups = [
        _group_of(weight, (names or {}).get(id(weight), ""), settings) for weight in parameters
    ]
    decay = settings.weight_decay
    match settings.optimizer:
        case "adamw":
            return torch.optim.AdamW(
                groups, betas=settings.betas, eps=settings.epsilon, weight_decay=decay
            )
        case "sgd":
            return torch.optim.SGD(
                groups, lr=1.0, momentum=settings.momentum, nesterov=settings.nesterov,
                weight_decay=decay,
            )  # fmt: skip
        case "lion":
            return _PlainOptimizer(groups, decay, lambda *args: _lion(settings, *args))
        case "muon":
            rows = joined or {}
            inner = {
                id(weight): rows.get((names or {}).get(id(weight), ""), (len(weight),))
                for weight in hidden
                if weight.dim() == 2
            }
            return _PlainOptimizer(groups, decay, lambda *args: _muon(settings, inner, *args))
        case "lamb":
            return _PlainOptimizer(groups, decay, lambda *args: _lamb(settings, *args))
        case "adafactor":
            return _PlainOptimizer(groups, decay, lambda *args: _adafactor(settings, *args))
        case "schedule-free":
            return _PlainOptimizer(groups, decay, lambda *args: _schedule_free(settings, *args))


def _group_of(weight: nn.Parameter, name: str, settings: TrainSettings) -> dict[str, Any]:
    """A weight as a parameter group of its own."""
    own = next((g for g in settings.groups if fnmatchcase(name, g.pattern)), None)
    group: dict[str, Any] = {"params": [weight], "factor": own.rate_factor if own else 1.0}
    if own is not None and own.weight_decay is not None:
        group["weight_decay"] = own.weight_decay
    elif weight.dim() <= 1:
        group["weight_decay"] = 0.0
    return group


class _PlainOptimizer(torch.optim.Optimizer):
    """Updates weight by weight with a function of the weight, its state and its group."""

    def __init__(
        self,
        groups: Groups,
        weight_decay: float,
        update: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None],
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes one step."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, self.state[weight], group)


def _lion(
    settings: TrainSettings, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    beta1, beta2 = settings.betas
    m = state.get("m", torch.zeros_like(w))
    direction = ((beta1 * m + (1 - beta1) * g) / settings.epsilon).clamp(-1, 1)
    w.sub_(group["lr"] * (direction + group["weight_decay"] * w))
    state["m"] = beta2 * m + (1 - beta2) * g


def _lamb(
    settings: TrainSettings, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    u = _adam_direction(settings, w, g, state) + group["weight_decay"] * w
    scale = w.norm() / u.norm() if w.dim() > 1 and w.norm() > 0 and u.norm() > 0 else 1.0
    w.sub_(group["lr"] * scale * u)


def _muon(
    settings: TrainSettings,
    inner: Mapping[int, Sequence[int]],
    w: Tensor,
    g: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
) -> None:
    rate, decay = group["lr"], group["weight_decay"]
    if id(w) not in inner:
        _adamw(settings, w, g, state, group)
        return
    momentum = settings.momentum
    m = state["m"] = momentum * state.get("m", torch.zeros_like(w)) + (1 - momentum) * g
    u = (1 - momentum) * g + momentum * m if settings.nesterov else m
    directions = [
        math.sqrt(max(part.shape)) * _orthogonal(part).to(w.dtype)
        for part in u.split(list(inner[id(w)]))
    ]
    w.sub_(rate * decay * w + rate * 0.2 * torch.cat(directions))


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix if matrix.dtype == torch.float64 else matrix.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.mT if tall else x


def _adamw(
    settings: TrainSettings, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    u = _adam_direction(settings, w, g, state)
    w.sub_(group["lr"] * (u + group["weight_decay"] * w))


def _adafactor(
    settings: TrainSettings, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    rate, t = group["lr"], state.get("t", 0) + 1
    a = rate
    if settings.relative_step:
        a = max(1e-3, float(w.square().mean().sqrt())) * min(rate, t**-0.5)
    newest, squares = t**-0.8, g.square() + settings.epsilon
    means = {"v": squares}
    if w.dim() > 1:
        means = {"r": squares.mean(dim=-1, keepdim=True), "c": squares.mean(dim=-2, keepdim=True)}
    v = {kind: (1 - newest) * state.get(kind, 0.0) + newest * means[kind] for kind in means}
    state.update(v, t=t)
    estimate = v["r"] / v["r"].mean(dim=-2, keepdim=True) * v["c"] if w.dim() > 1 else v["v"]
    u = g / estimate.sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt()))
    w.sub_(rate * group["weight_decay"] * w + a * u)


def _schedule_free(
    settings: TrainSettings, y: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """The paper's three sequences, each of its own; `state["x"]` is what is evaluated."""
    beta1, beta2 = settings.betas
    rate, t = group["lr"], state.get("t", 0) + 1
    x, z = state.get("x", y.clone()), state.get("z", y.clone())
    v = beta2 * state.get("v", torch.zeros_like(y)) + (1 - beta2) * g**2
    u = g / ((v / (1 - beta2**t)).sqrt() + settings.epsilon) + group["weight_decay"] * y
    largest = max(rate, state.get("largest", 0.0))
    total = state.get("total", 0.0) + largest**2
    c = largest**2 / total
    z = z - rate * u
    x = (1 - c) * x + c * z
    y.copy_((1 - beta1) * z + beta1 * x)
    state.update(t=t, x=x, z=z, v=v, largest=largest, total=total)


def _adam_direction(settings: TrainSettings, w: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    beta1, beta2 = settings.betas
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g**2
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + settings.epsilon)
