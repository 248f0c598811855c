"""Chains and graphs that tests of capture share."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from windlass.capture.capture_layers import capture_graph
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.schema.graph import Graph

# `measuring.py` is found by name; tests are imported each on its own.
sys.path.insert(0, str(Path(__file__).parent))


@cache
def _captured(name: str, dials: tuple[tuple[str, int], ...]) -> tuple[LayerStack, Graph]:
    chain = build_layer_stack(name, dict(dials), device="meta", seed=0)
    return chain, capture_graph(chain)


@pytest.fixture(scope="session")
def captured() -> Callable[..., tuple[LayerStack, Graph]]:
    """`captured(name, layers=2)`: a chain without memory and its graph."""
    return lambda name, **dials: _captured(name, tuple(sorted(dials.items())))
