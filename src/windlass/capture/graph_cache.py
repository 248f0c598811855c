"""Keeps captured graphs as files, so that a model is captured once.

This module does not import torch, so that a cached graph is loaded at once.
"""

import hashlib
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from windlass.atomic_files import atomic_write, seal, source_digest, unseal
from windlass.schema import Graph

_SOURCE_PACKAGES = ("capture", "models", "schema", "sparsity")
"""Packages whose code decides the content of a graph."""


def load_graph(folder: Path, key: str) -> Graph | None:
    """The graph stored under a key; None if there is none, or its file is damaged or edited."""
    try:
        content = unseal(_path(folder, key).read_bytes())
        return None if content is None else Graph.model_validate_json(content)
    except (OSError, ValidationError):
        return None


def save_graph(folder: Path, key: str, graph: Graph) -> None:
    """Stores a graph under a key, atomically.

    Args:
        folder: folder of the cache; it is created if missing.
        key: letters, digits, `-`, `_` and `.` only, such as a fingerprint.
    """
    atomic_write(_path(folder, key), seal(graph.to_json().encode()))


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.graph"


def graph_key(model: str, user_file: Path | None) -> str:
    """Sixteen hexadecimal digits that change with the model, torch and all code involved.

    Args:
        model: the model request as JSON.
        user_file: the user's file that the model is made from; None for a model of the catalog.
            The Python files beside it count too, because it may import them.
    """
    code = source_digest(*_SOURCE_PACKAGES)
    digest = hashlib.sha256(f"{model} torch {metadata.version('torch')} {code}".encode())
    if user_file is not None and user_file.is_file():
        beside = (path for path in user_file.parent.glob("*.py") if path.is_file())
        for path in sorted({user_file, *beside}):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
