"""Which compiled code earlier runs have left here, so that plans do not count it anew."""

import hashlib
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from windlass.atomic_files import atomic_write, cache_folder, source_digest
from windlass.cost import CompiledCode, KeptCode
from windlass.errors import StorageError
from windlass.jobs.known_machines import HERE
from windlass.schema import Graph, Plan

_COMPILED_PACKAGES = ("models", "runtime", "sparsity", "torch_ext")
"""Packages whose code is compiled, or decides what is."""
_CODES = TypeAdapter(tuple[CompiledCode, ...])


def load_kept_code(graph: Graph, machine: str) -> KeptCode:
    """The code of a model that runs have compiled here; none if it is damaged or for elsewhere.

    Args:
        machine: the name that a request gives its machine.
    """
    if machine != HERE:
        return frozenset()
    try:
        return frozenset(_CODES.validate_json(_path(graph).read_bytes()))
    except (OSError, ValidationError):
        return frozenset()


def note_compiled_code(plan: Plan, graph: Graph) -> None:
    """Notes the code of a plan whose first step has run; a full disk notes nothing."""
    codes = load_kept_code(graph, HERE)
    if not plan.compile or CompiledCode.of(plan) in codes:
        return
    try:
        _path(graph).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(_path(graph), _CODES.dump_json((*codes, CompiledCode.of(plan))))
    except (StorageError, OSError):
        return


def _path(graph: Graph) -> Path:
    parts = (
        metadata.version("windlass"), metadata.version("torch"),
        source_digest(*_COMPILED_PACKAGES), graph.label,
    )  # fmt: skip
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "compiled-code" / f"{name}.json"
