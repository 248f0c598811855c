"""Parameter groups: which weights have a learning rate and a weight decay of their own."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from windlass.errors import InputErrors, did_you_mean
from windlass.models import LayerStack
from windlass.runtime.parameters import SHARD_SEPARATOR
from windlass.schema import ParameterGroup, TrainSettings


def group_of(name: str, groups: Iterable[ParameterGroup]) -> ParameterGroup | None:
    """The first group whose pattern a weight's name matches; None if none does.

    Args:
        name: full name of the weight, or of a shard of it.
    """
    full = name.partition(SHARD_SEPARATOR)[0]
    return next((group for group in groups if fnmatchcase(full, group.pattern)), None)


def rate_and_decay(
    name: str, rate: float, settings: TrainSettings, *, decays: bool
) -> tuple[float, float]:
    """Learning rate and weight decay of a weight in one step.

    Args:
        name: full name of the weight, or of a shard of it.
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
