"""Graphs kept as files, so that a model is captured once.

No torch here: a kept graph must answer at once.
"""

import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from windlass.schema.graph import Graph


def load_graph(folder: Path, key: str) -> Graph | None:
    """The graph kept under a key; None if there is none, or its file is damaged."""
    try:
        return Graph.model_validate_json(_path(folder, key).read_bytes())
    except (OSError, ValidationError):
        return None


def save_graph(folder: Path, key: str, graph: Graph) -> None:
    """Keeps a graph under a key, whole or not at all.

    Args:
        folder: of all kept graphs; made if missing.
        key: letters, digits, `-`, `_` and `.` only: a fingerprint, for example.
        graph: replaces what was kept under the key.

    Raises:
        StorageError: the disk is full or closed.
    """
    graph.save(_path(folder, key))


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


_ROOMS = ("capture", "models", "spec")
"""Whose code decides what a graph says."""


def graph_key(model: str, user_file: Path | None) -> str:
    """Sixteen hexadecimal digits.

    Args:
        model: the request for the model, as JSON.
        own_file: the user's file that builds it; None for a model of the catalogue. The Python
            files beside it count too, since it may import them.
    """
    digest = hashlib.sha256(f"{model} torch {metadata.version('torch')}".encode())
    for path in _sources(user_file):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(own_file: Path | None) -> Iterator[Path]:
    house = Path(__file__).parent.parent
    for room in _ROOMS:
        yield from sorted((house / room).glob("*.*"))
    if own_file is not None and own_file.is_file():
        yield from sorted({own_file, *own_file.parent.glob("*.py")})
