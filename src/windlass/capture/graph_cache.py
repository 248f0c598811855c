"""Graphs kept as files, so that a model is captured once.

No torch here: a kept graph must answer at once.
"""

from pathlib import Path

from pydantic import ValidationError

from windlass.spec.graph import Graph


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
