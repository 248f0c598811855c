"""Graphs cached as files."""

import subprocess
import sys
from pathlib import Path

import pytest

from factories import catalog_graph
from windlass.capture.graph_cache import graph_key, load_graph, save_graph


def test_a_cached_graph_is_loaded_equal(tmp_path: Path):
    graph = catalog_graph("gpt-tiny", layers=2)

    save_graph(tmp_path / "graphs", "a1b2", graph)

    loaded = load_graph(tmp_path / "graphs", "a1b2")
    assert loaded == graph
    assert loaded is not None
    assert loaded.label == graph.label


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"name": "x"}', b"\xff\x00"])
def test_a_missing_or_damaged_file_is_no_graph(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "key.graph").write_bytes(content)

    assert load_graph(tmp_path, "key") is None


def test_a_cached_graph_with_a_changed_digit_is_no_graph(tmp_path: Path):
    save_graph(tmp_path, "key", catalog_graph("gpt-tiny", layers=2))
    path = tmp_path / "key.graph"
    path.write_text(path.read_text().replace('"count":2', '"count":3'))

    assert load_graph(tmp_path, "key") is None


def test_the_cache_does_not_import_torch():
    code = "import sys; import windlass.capture.graph_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_file_and_what_it_may_import_change_the_key(tmp_path: Path):
    model, beside = tmp_path / "model.py", tmp_path / "layers.py"
    model.write_text("import layers")
    keys = [graph_key("{}", None), graph_key("{}", model)]
    beside.write_text("width = 1")
    keys.append(graph_key("{}", model))
    beside.write_text("width = 2")
    keys.append(graph_key("{}", model))

    assert len(set(keys)) == 4
    assert graph_key("{}", model) == keys[-1]
