"""Runs note the code that they have compiled, and later plans here know it."""

from pathlib import Path

import pytest

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.cost import CompiledCode
from windlass.jobs.kept_results import load_kept_code, note_compiled_code

GRAPH = tiny_graph()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_code_is_known_here_once_a_plan_with_it_has_run_and_nowhere_else():
    eager = tiny_plan(GRAPH, tiny_machine())
    compiled = eager.model_copy(update={"compile": True})
    other = compiled.model_copy(update={"precision": "bfloat16"})
    note_compiled_code(eager, GRAPH)
    assert load_kept_code(GRAPH, "here") == frozenset()
    for plan in (compiled, other, compiled):
        note_compiled_code(plan, GRAPH)
    assert load_kept_code(GRAPH, "here") == {CompiledCode.of(compiled), CompiledCode.of(other)}
    assert load_kept_code(GRAPH, "h100") == frozenset()
    assert load_kept_code(tiny_graph(layers=9), "here") == frozenset()


def test_a_damaged_list_of_code_counts_as_none(tmp_path: Path):
    plan = tiny_plan(GRAPH, tiny_machine()).model_copy(update={"compile": True})
    note_compiled_code(plan, GRAPH)
    (file,) = tmp_path.rglob("compiled-code/*.json")
    for damage in (b"", b"[[", b"\xff", b'[["a", 1]]'):
        file.write_bytes(damage)
        assert load_kept_code(GRAPH, "here") == frozenset()
    note_compiled_code(plan, GRAPH)
    assert load_kept_code(GRAPH, "here") == {CompiledCode.of(plan)}
