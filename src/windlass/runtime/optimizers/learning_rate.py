"""The learning rate of each step: a warm-up, then a schedule."""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

from windlass.errors import InputErrors, did_you_mean
from windlass.models import LayerStack
from windlass.runtime.parameters import SHARD_SEPARATOR
from windlass.schema import ParameterGroup, TrainSettings


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Learning rate of a step: linear warm-up, then what the schedule says.

    Sources: `cosine` Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5, without
    restarts; `wsd` Hu et al. 2024, arXiv:2404.06395, with the linear decay of Hägele et al. 2024,
    arXiv:2405.18392; `inverse_sqrt` Vaswani et al. 2017, arXiv:1706.03762, equation 3.

    Args:
        settings: peak rate, schedule, shares of warm-up and decay, final share, number of steps.
    """
    steps, schedule = settings.steps, settings.schedule
    warmup_steps = round(settings.warmup * steps)
    if step <= warmup_steps:
        return settings.learning_rate * step / warmup_steps
    if schedule == "inverse_sqrt":
        return settings.learning_rate * math.sqrt(max(1, warmup_steps) / step)
    falling = round(settings.decay * steps) if schedule == "wsd" else steps - warmup_steps
    falling = max(1, falling)
    progress = min(1.0, max(0, step - (steps - falling)) / falling)
    height = 1 - progress
    if schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule == "constant":
        height = 1.0
    share = settings.final_rate + (1 - settings.final_rate) * height
    return settings.learning_rate * share


class NewestShares:
    """The share of each step's weights in the average over the steps so far.

    A step counts by the square of the largest learning rate up to it, so that those of the warm-up
    count little. Source: Defazio et al. 2024, arXiv:2405.15682, section 4.3.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        self._largest, self._sum = 0.0, 0.0
        self._shares: list[float] = []

    def of_step(self, step: int) -> float:
        """The share of a step, counted from 1; 1 in the first."""
        for next_step in range(len(self._shares) + 1, step + 1):
            self._largest = max(self._largest, learning_rate(self._settings, next_step))
            weight = self._largest**2
            self._sum += weight
            self._shares.append(weight / self._sum if self._sum else 1.0)
        return self._shares[step - 1]


def group_of(name: str, groups: Iterable[ParameterGroup]) -> ParameterGroup | None:
    """The first group whose pattern a weight's name matches; None if none does."""
    full = name.partition(SHARD_SEPARATOR)[0]
    return next((group for group in groups if fnmatchcase(full, group.pattern)), None)


def rate_and_decay(
    name: str, rate: float, settings: TrainSettings, *, decays: bool
) -> tuple[float, float]:
    """Learning rate and weight decay of a weight in one step.

    Args:
        decays: whether weights of its dimensions decay where no group says otherwise.
    """
    decay = settings.weight_decay if decays else 0.0
    group = group_of(name, settings.groups)
    if group is None:
        return rate, decay
    return rate * group.rate_factor, decay if group.weight_decay is None else group.weight_decay


def require_group_matches(groups: Iterable[ParameterGroup], stack: LayerStack) -> None:
    """Refuses groups that match no weight.

    Raises:
        InputErrors: the pattern of every such group.
    """
    layers = zip(stack.names, stack.layers, strict=True)
    names = [f"{name}.{path}" for name, layer in layers for path, _ in layer.named_parameters()]
    errors = [
        f"`train.groups` has the pattern `{group.pattern}`, and no weight has such a name"
        f"{did_you_mean(group.pattern, names)}; write names such as `{names[0]}`, with `*` for any "
        "part"
        for group in groups
        if not any(fnmatchcase(name, group.pattern) for name in names)
    ]
    if errors:
        raise InputErrors(errors)
