"""Norm, clipping and update of a rank's weights, by `torch.optim`."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.weights import StageWeight, local_shard
from windlass.runtime import StepNumbers, learning_rate, rate_and_decay
from windlass.schema import TrainSettings, optimizer_law
from windlass.torch_ext import Device

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""torch's names of an optimizer's moments, in the order of our law."""


class StageOptimizer:
    """The optimizer of a rank, which updates FSDP's shards."""

    def __init__(
        self,
        settings: TrainSettings,
        device: Device,
        weights: Sequence[StageWeight],
        ranks: MeshRank,
    ) -> None:
        self._settings, self._ranks = settings, ranks
        self._numbers = StepNumbers(settings, device)
        self._weights = [each for each in weights if each.parameter.requires_grad]
        self._optimizer = self._make()
        for weight in self._weights:
            self._optimizer.state[weight.parameter] = self._new_state(weight.parameter)

    def _make(self) -> torch.optim.Optimizer:
        settings = self._settings
        groups: dict[tuple[float, float], list[StageWeight]] = defaultdict(list)
        for weight in self._weights:
            own = rate_and_decay(weight.name, 1.0, settings, decays=weight.decays)
            groups[own].append(weight)
        options = [
            {"params": [w.parameter for w in each], "weight_decay": decay, "share": share}
            for (share, decay), each in groups.items()
        ]
        if settings.optimizer == "sgd":
            return torch.optim.SGD(
                options, lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov, fused=True
            )
        return torch.optim.AdamW(
            options, lr=0.0, betas=settings.betas, eps=settings.epsilon, fused=True
        )

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        names = self.moment_names
        state = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        return state | {"step": torch.zeros((), device=local_shard(parameter).device)}

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Torch's names of the moments."""
        names = _MOMENTS[self._settings.optimizer]
        return names[: optimizer_law(self._settings.optimizer).moments_of(matrix=False)]

    def moments(self, weight: StageWeight) -> list[Tensor]:
        """The moments of a weight, sharded as it is."""
        state = self._optimizer.state[weight.parameter]
        return [state[name] for name in self.moment_names]

    def updates(self, weight: StageWeight) -> Tensor:
        """`Float[]`: number of updates of a weight so far."""
        count: Tensor = self._optimizer.state[weight.parameter]["step"]
        return count

    def reduce_gradients(self) -> None:
        """Sums what tensor-parallel ranks and the stages of tied weights have of a gradient."""
        if self._ranks.tensor_group.size() > 1:
            alike = [each for each in self._weights if each.is_whole]
            _all_reduce(_gradients(alike), self._ranks.tensor_group)
        for weight in self._weights:
            if weight.group is not None:
                self._sum_tied(weight, weight.group)

    @staticmethod
    def _sum_tied(weight: StageWeight, group: dist.ProcessGroup) -> None:
        if weight.parameter.grad is None:
            weight.parameter.grad = torch.zeros_like(weight.parameter, requires_grad=False)
        _all_reduce(_gradients([weight]), group)

    def norms(self) -> Sequence[Tensor]:
        """2-norms of this rank's part of all gradients, each element counted on one rank."""
        is_replica, others_have_it = self._ranks.replica > 0, self._ranks.coord.tensor_rank > 0
        counted = [
            weight
            for weight in self._weights
            if not (is_replica or weight.is_copy or (weight.is_whole and others_have_it))
        ]
        gradients = _gradients(counted)
        return torch._foreach_norm(gradients) if gradients else ()  # noqa: SLF001  no public name

    def broken_weights(self) -> list[str]:
        """Names of the weights whose gradients are not finite on this rank."""
        return [
            weight.name
            for weight in self._weights
            if not all(bool(each.isfinite().all()) for each in _gradients([weight]))
        ]

    def update(self, step: int, norm: float) -> None:
        """Takes one step with gradients clipped by their norm, and drops them."""
        divisor = self._numbers.clip_divisor(norm)
        if divisor is not None:
            torch._foreach_div_(_gradients(self._weights), divisor)
        rate = learning_rate(self._settings, step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["share"]
        self._optimizer.step()
        if self._settings.optimizer == "sgd":
            for weight in self._weights:
                self.updates(weight).add_(1)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drops all gradients."""
        self._optimizer.zero_grad()


def _gradients(weights: Sequence[StageWeight]) -> list[Tensor]:
    """This rank's shards of the gradients that some weights have."""
    gradients = (weight.parameter.grad for weight in weights)
    return [local_shard(each) for each in gradients if each is not None]


def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors of one type in place over a group, in one collective."""
    present = [each for each in tensors if each.numel()]
    if not present:
        return
    flat = torch.cat([each.reshape(-1) for each in present])
    dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in present])
    torch._foreach_copy_(
        present, [part.view_as(each) for part, each in zip(parts, present, strict=True)]
    )
