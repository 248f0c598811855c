"""The name under which a graph is kept; it changes with the model, its file, torch and our code."""

import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

_ROOMS = ("capture", "models", "spec")
"""Whose code decides what a graph says."""


def graph_key(model: str, own_file: Path | None) -> str:
    """Sixteen hexadecimal digits.

    Args:
        model: the request for the model, as JSON.
        own_file: the user's file that builds it; None for a model of the catalogue. The Python
            files beside it count too, since it may import them.
    """
    digest = hashlib.sha256(f"{model} torch {metadata.version('torch')}".encode())
    for path in _sources(own_file):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(own_file: Path | None) -> Iterator[Path]:
    house = Path(__file__).parent.parent
    for room in _ROOMS:
        yield from sorted((house / room).glob("*.*"))
    if own_file is not None and own_file.is_file():
        yield from sorted({own_file, *own_file.parent.glob("*.py")})
