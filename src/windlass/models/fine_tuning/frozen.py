"""Freezes weights of a model, by patterns of their names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from windlass.errors import ModelError, did_you_mean


def freeze_weights(model: nn.Module, name: str, patterns: Iterable[str]) -> None:
    """Freezes the weights whose names match a pattern, in place; the others stay as they are.

    Args:
        model: the model, some of whose weights may be frozen already.
        name: its name in messages.
        patterns: patterns of full names of weights, in which `*` matches anything.

    Raises:
        ModelError: a pattern matches no weight, or no weight is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [path for path in parameters if fnmatchcase(path, pattern)]
        if not matching:
            raise ModelError(
                f"`train.frozen` has `{pattern}`, and no weight of `{name}` has such a name"
                f"{did_you_mean(pattern, list(parameters))}; write names such as "
                f"`{next(iter(parameters), 'blocks.0.*')}`, with `*` for any part"
            )
        for path in matching:
            parameters[path].requires_grad = False
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError(
            f"all {len(parameters)} weights of `{name}` are frozen, so nothing would be trained; "
            "freeze fewer in `train.frozen` or in the model, or add `lora.rank` for adapters"
        )
