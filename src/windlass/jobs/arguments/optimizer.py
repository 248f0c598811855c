"""What a caller passes as `optimizer`: a name, a class of torch's or an object, as overrides."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any, cast, get_args

from windlass.document import format_value
from windlass.errors import RequestError
from windlass.schema import OptimizerName

_SETTINGS = {
    "lr": "learning_rate", "betas": "betas", "eps": "epsilon", "weight_decay": "weight_decay",
    "momentum": "momentum", "nesterov": "nesterov",
}  # fmt: skip
"""Settings of torch's optimizers, and the keys of `train` that mean the same."""
_CLASSES: Mapping[str, tuple[OptimizerName, tuple[str, ...]]] = {
    "AdamW": ("adamw", ("lr", "betas", "eps", "weight_decay")),
    "SGD": ("sgd", ("lr", "momentum", "nesterov", "weight_decay")),
}
"""Classes of `torch.optim` that compute what one of ours does, and the settings that both read."""
_FREE = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""What says how an optimizer computes, not what."""


def optimizer_overrides(optimizer: object) -> tuple[str, ...]:
    """The overrides that an optimizer stands for; its weights and its state are not used.

    Args:
        optimizer: a name as `train.optimizer` has it; a class of `torch.optim`, or a function that
            is given weights and returns an optimizer; or an optimizer. Of a class alone the
            learning rate stays open.

    Raises:
        RequestError: none of Windlass's computes what it does.
    """
    names = ", ".join(f"`{name}`" for name in get_args(OptimizerName))
    if isinstance(optimizer, str):
        return (f"train.optimizer={optimizer}",)
    made = _made(optimizer)
    kind = type(optimizer if made is None else made)
    if made is None or kind.__name__ not in _CLASSES or not kind.__module__.startswith("torch.opt"):
        what = f"a `{kind.__module__}.{kind.__name__}`"
        raise RequestError(
            f"`optimizer` is {what}; it takes a name ({names}), or "
            f"{' or '.join(f'`torch.optim.{name}`' for name in _CLASSES)} as a class or an object; "
            "any other runs in a loop of your own, which `TrackedRun` records"
        )
    law, known = _CLASSES[kind.__name__]
    settings = _settings(made, known)
    if isinstance(optimizer, type):
        del settings["lr"]
    return (
        f"train.optimizer={law}",
        *(f"train.{_SETTINGS[key]}={format_value(value)}" for key, value in settings.items()),
    )


def _made(optimizer: object) -> Any | None:  # noqa: ANN401  an optimizer of torch's
    """The optimizer that was passed, or that a class or function makes; None if it is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    made = optimizer
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        try:
            made = optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
        except Exception as error:
            raise RequestError(
                f"`optimizer` is called with a list of weights and fails: {type(error).__name__}: "
                f"{error}"
            ) from error
    return made if isinstance(made, torch.optim.Optimizer) else None


def _settings(made: Any, known: tuple[str, ...]) -> dict[str, object]:  # noqa: ANN401  of torch
    """The settings of an optimizer that both read."""
    name, groups = type(made).__name__, made.param_groups
    settings = [{key: group[key] for key in group if key not in _FREE} for group in groups]
    if any(each != settings[0] for each in settings):
        raise RequestError(
            f"`optimizer` is a `{name}` with {len(groups)} groups of weights whose settings "
            "differ; write them as `train.groups`"
        )
    usual = inspect.signature(type(made)).parameters
    for key, value in settings[0].items():
        if key not in known and key in usual and value != usual[key].default:
            raise RequestError(
                f"`optimizer` is a `{name}` with `{key}={value}`, which Windlass does not compute; "
                "leave it out"
            )
    return {key: _number(settings[0][key]) for key in known}


def _number(value: object) -> object:
    """A setting as a request has it; a learning rate may be a tensor."""
    if isinstance(value, bool | tuple):
        return value
    return float(cast("Any", value))
