"""Plans kept by the fingerprint of all that decides them: the same question is answered at once."""

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from windlass.atomic_files import atomic_write, cache_folder, seal, source_digest, unseal
from windlass.cost import CompiledCode, KeptCode
from windlass.errors import StorageError
from windlass.jobs.known_machines import HERE
from windlass.planner import PlanningResult
from windlass.schema import DataSize, Graph, Machine, Plan, Request

_DECIDING_PACKAGES = (
    "api", "capture", "cost", "models", "planner", "program", "schema", "sparsity", "stacks",
)  # fmt: skip
"""Packages whose code decides a plan and its prediction."""
_MOST_KEPT = 200
"""Plans that are kept; the oldest go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """The outcome of a search."""

    result: PlanningResult
    most_sequences: int | None
    """The default batch for which it is, if the usual one did not fit; None if that did."""


def plan_key(
    request: Request,
    graph: Graph,
    machine: Machine,
    kept_code: KeptCode,
    data: DataSize | None = None,
    explains: bool = True,
) -> str:
    """Sixteen hexadecimal digits that change with the question and with all code that answers it.

    Args:
        request: as it was asked, before what it leaves open is decided.
        machine: with the stack that drives it, if that is not Windlass's own runtime.
        kept_code: compiled code of the model that earlier runs have left on the machine.
        data: how much there is to train on, where defaults follow from that.
        explains: whether the answer says what comes next.
    """
    # A pin that equals its default is a pin all the same.
    asked = request.model_dump_json(exclude_unset=True)
    parts = (
        metadata.version("windlass"), source_digest(*_DECIDING_PACKAGES), asked, graph.label,
        str(graph.base), machine.label, repr(sorted(map(str, kept_code))), repr((data, explains)),
    )  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def load_kept_plan(key: str) -> KeptPlan | None:
    """The outcome kept under a key; None if there is none, or its file is damaged or edited."""
    try:
        content = unseal(_path(key).read_bytes())
        return None if content is None else TypeAdapter(KeptPlan).validate_json(content)
    except (OSError, ValidationError):
        return None


def keep_plan(key: str, kept: KeptPlan) -> None:
    """Keeps an outcome under a key, atomically; a cache that cannot be written keeps nothing."""
    try:
        atomic_write(_path(key), seal(TypeAdapter(KeptPlan).dump_json(kept)))
        _remove_oldest(_path(key).parent)
    except (StorageError, OSError):
        return


def _path(key: str) -> Path:
    return cache_folder() / "plans" / f"{key}.plan"


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.plan"), key=lambda path: -path.stat().st_mtime)
    for path in files[_MOST_KEPT:]:
        path.unlink(missing_ok=True)


_COMPILED_PACKAGES = ("models", "runtime", "sparsity", "torch_ext")
"""Packages whose code is compiled, or decides what is."""
_CODES = TypeAdapter(tuple[CompiledCode, ...])


def load_kept_code(graph: Graph, machine: str) -> KeptCode:
    """The code of a model that runs have compiled here; none if it is damaged or for elsewhere."""
    if machine != HERE:
        return frozenset()
    try:
        return frozenset(_CODES.validate_json(_code_path(graph).read_bytes()))
    except (OSError, ValidationError):
        return frozenset()


def note_compiled_code(plan: Plan, graph: Graph) -> None:
    """Notes the code of a plan whose first step has run; a full disk notes nothing."""
    codes = load_kept_code(graph, HERE)
    if not plan.compile or CompiledCode.of(plan) in codes:
        return
    try:
        _code_path(graph).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(_code_path(graph), _CODES.dump_json((*codes, CompiledCode.of(plan))))
    except (StorageError, OSError):
        return


def _code_path(graph: Graph) -> Path:
    parts = (
        metadata.version("windlass"), metadata.version("torch"),
        source_digest(*_COMPILED_PACKAGES), graph.label,
    )  # fmt: skip
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "compiled-code" / f"{name}.json"
