"""Chains and graphs that tests of capture share."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from windlass.capture.capture_graph import capture
from windlass.models.build import build_chain
from windlass.models.layer_stack import Chain
from windlass.schema.graph import Graph

# `measuring.py` is found by name; tests are imported each on its own.
sys.path.insert(0, str(Path(__file__).parent))


@cache
def _captured(name: str, dials: tuple[tuple[str, int], ...]) -> tuple[Chain, Graph]:
    chain = build_chain(name, dict(dials), device="meta", seed=0)
    return chain, capture(chain)


@pytest.fixture(scope="session")
def captured() -> Callable[..., tuple[Chain, Graph]]:
    """`captured(name, layers=2)`: a chain without memory and its graph."""
    return lambda name, **dials: _captured(name, tuple(sorted(dials.items())))
