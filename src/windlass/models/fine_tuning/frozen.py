"""Freezes weights of a model, by patterns of their names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from windlass.errors import ModelError, did_you_mean


def freeze_weights(model: nn.Module, name: str, patterns: Iterable[str]) -> None:
    """Freezes the weights whose names match a pattern, in place; the others stay as they are.

    Args:
        patterns: patterns of full names of weights, in which `*` matches anything.

    Raises:
        ModelError: a pattern matches no weight, or no weight is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = tuple(parameters)
    example = names[0] if names else "blocks.0.*"
    for pattern in patterns:
        for path in matching_weights(names, pattern, name, "train.frozen", example):
            parameters[path].requires_grad = False
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError(
            f"all {len(parameters)} weights of `{name}` are frozen, so nothing would be trained; "
            "freeze fewer in `train.frozen` or in the model, or add `lora.rank` for adapters"
        )


def matching_weights(
    names: Sequence[str], pattern: str, model: str, setting: str, example: str
) -> tuple[str, ...]:
    """The weights whose names match a pattern, one at least.

    Args:
        setting: the key of a request that the pattern comes from.

    Raises:
        ModelError: no weight matches.
    """
    matching = tuple(path for path in names if fnmatchcase(path, pattern))
    if not matching:
        raise ModelError(
            f"`{setting}` has `{pattern}`, and no weight of `{model}` has such a name"
            f"{did_you_mean(pattern, names)}; write full names such as `{example}`, with `*` for "
            "any part"
        )
    return matching
