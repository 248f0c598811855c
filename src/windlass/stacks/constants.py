"""The constants and capabilities of a stack, each with its unit, meaning and source."""

from dataclasses import dataclass

from windlass.document import leaf_fields
from windlass.schema import Source, Stack, source_of
from windlass.units import format_bytes, format_seconds

_NO_CONSTANTS = ("name", "about", "engine", "similar_to", "constants_of", "sources")
_DEFAULT = Source(how="convention", source="the default")
_UNNAMED = Source(how="unverified", source="stated without a source")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConstant:
    """One constant or capability of a stack."""

    key: str
    """Such as `launch_seconds` or `can.schedules`."""
    value: object
    """In the base unit: seconds, bytes, or a share."""
    text: str
    """The value with a unit, for people."""
    meaning: str
    source: Source


def stack_constants(stack: Stack) -> tuple[StackConstant, ...]:
    """All constants and capabilities of a stack that have a value, in the order of its file."""
    return tuple(
        StackConstant(
            key=key,
            value=value,
            text=_text(key, value),
            meaning=" ".join((field.description or "").split()),
            source=constant_source(stack, key),
        )
        for key, field in leaf_fields(Stack)
        if key not in _NO_CONSTANTS and (value := _value(stack, key)) is not None
    )


def constant_source(stack: Stack, key: str) -> Source:
    """Where a stack's constant at a dotted key comes from."""
    stated = source_of(key, stack.sources)
    if stated is not None:
        return stated
    table, _, name = key.rpartition(".")
    owner = getattr(stack, table) if table else stack
    is_stated = name in owner.model_fields_set and (not table or table in stack.model_fields_set)
    return _UNNAMED if is_stated else _DEFAULT


def _value(stack: Stack, key: str) -> object:
    value: object = stack
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("_seconds"):
        return format_seconds(value) if value else "0 s"
    if key in ("memory.context_bytes", "memory.buffer_bytes"):
        return format_bytes(value)
    if key in ("memory.gradient_bytes", "reduce_bytes"):
        return f"{value:g} bytes"
    if key.endswith(("overlap", "exposed", "share", "launches")):
        return f"{100 * value:.3g} %"
    return f"{value:.3g}"
