"""Software stacks by name, from the TOML files beside this module or from a file of the user's own.

`windlass` is Windlass's own runtime. The others predict how the same plan runs on other software.
"""

from functools import cache
from pathlib import Path

from windlass.errors import StackError, did_you_mean, shorten
from windlass.schema import OWN_STACK, Stack
from windlass.stacks.constants import StackConstant, constant_source, stack_constants

__all__ = [
    "StackConstant", "constant_source", "load_stack", "stack_constants", "stack_names",
]  # fmt: skip

_FOLDER = Path(__file__).parent


def stack_names() -> tuple[str, ...]:
    """All names that `load_stack` knows, Windlass's own first."""
    return (OWN_STACK.name, *sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def load_stack(name: str) -> Stack:
    """The stack of that name, or the one that a TOML file of the user describes.

    Args:
        name: a name from `stack_names`; one that ends in `.toml` is a path.

    Raises:
        StackError: no stack has this name.
        RequestError: the file cannot be read.
        InputErrors: everything that is wrong in the file.
    """
    if name == OWN_STACK.name:
        return OWN_STACK
    if name.endswith(".toml"):
        return _with_constants(Stack.load(Path(name)))
    if name not in stack_names():
        raise StackError(
            f"unknown stack `{shorten(name)}`{did_you_mean(name, stack_names())}; known are "
            f"{', '.join(f'`{each}`' for each in stack_names())}, and a path `FILE.toml` names a "
            "file of your own"
        )
    return _with_constants(Stack.load(_FOLDER / f"{name}.toml"))


def _with_constants(stack: Stack) -> Stack:
    """The stack with the constants of the one that its file names, where it states none."""
    if stack.constants_of is None:
        return stack
    base = load_stack(stack.constants_of)
    stated = {name: getattr(stack, name) for name in stack.model_fields_set}
    return base.model_copy(
        update=stated | {"similar_to": base.name, "sources": {**base.sources, **stack.sources}}
    )
