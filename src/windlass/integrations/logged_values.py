"""The numbers that one call of `log` records, and what of it is no number."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from windlass.errors import RequestError, shorten
from windlass.integrations.device_values import start_copy
from windlass.integrations.portable_run import free_name

if TYPE_CHECKING:
    import torch

    from windlass.integrations.device_values import Arriving

_STEPS = 2**63


class LoggedValues(NamedTuple):
    """What one call records."""

    numbers: "dict[str, Arriving]"
    """Numbers by name, of which those of a device arrive later."""
    devices: "set[torch.device]"
    """The devices of those."""
    refused: list[str]
    """What is no number, a sentence each."""


def read_values(values: Mapping[str, object]) -> LoggedValues:
    """The numbers of a mapping; nested ones get dotted names, each its own."""
    numbers: dict[str, Arriving] = {}
    refused: list[str] = []
    devices: set[torch.device] = set()
    for name, value in values.items():
        if type(value) is float and name not in numbers:
            numbers[name] = value
            continue
        for key, item in _flat_values(name, value):
            try:
                number = _number(key, item)
            except RequestError as error:
                refused.append(str(error))
                continue
            numbers[free_name(key, numbers)] = number
            if not isinstance(number, float):
                devices.add(cast("torch.Tensor", item).device)
    return LoggedValues(numbers, devices, refused)


def require_step(step: object) -> int:
    """The number of a step.

    Raises:
        RequestError: it is no integer of 64 bits.
    """
    if isinstance(step, int | np.integer) and -_STEPS <= step < _STEPS:
        return int(step)
    raise RequestError(f"step {shorten(repr(step))} is no integer of 64 bits; count steps from 1")


def _flat_values(name: str, value: object) -> Sequence[tuple[str, object]]:
    if not isinstance(value, Mapping):
        return ((name, value),)
    return [pair for key, item in value.items() for pair in _flat_values(f"{name}.{key}", item)]


def _number(name: str, value: object) -> "Arriving":
    """The number to record of a value.

    Raises:
        RequestError: it is none.
    """
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            return float(value)
        except OverflowError:
            raise RequestError(f"`{shorten(name)}` is too large for a number of 64 bits") from None
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    number = start_copy(shorten(str(name)), value)
    if number is None:
        raise RequestError(
            f"`{shorten(str(name))}` is {shorten(repr(value))}, a {type(value).__name__}; log "
            "numbers, and put the rest into `config` or `notes`"
        )
    return number
