"""The Python interface: a function for each command, which returns values instead of printing.

It gathers them from the rooms that do the work, and computes nothing itself.
"""

import ast
from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi")
_ROOMS = {
    alias.name: node.module
    for node in ast.parse(_STUB.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
}
"""Name -> the room that has it, imported when the name is first asked for."""

__all__ = sorted(_ROOMS)  # noqa: PLE0605  names of the stub


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return __all__
