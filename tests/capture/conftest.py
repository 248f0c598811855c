"""Layer stacks and graphs that tests of capture share."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from windlass.capture.capture_layers import capture_graph
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.schema.graph import Graph

# `measured_memory.py` is found by name; tests are imported each on its own.
sys.path.insert(0, str(Path(__file__).parent))


@cache
def _captured(name: str, arguments: tuple[tuple[str, int], ...]) -> tuple[LayerStack, Graph]:
    stack = build_layer_stack(name, dict(arguments), device="meta", seed=0)
    return stack, capture_graph(stack)


@pytest.fixture(scope="session")
def captured() -> Callable[..., tuple[LayerStack, Graph]]:
    """`captured(name, layers=2)`: a stack without memory and its graph."""
    return lambda name, **arguments: _captured(name, tuple(sorted(arguments.items())))
