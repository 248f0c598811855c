"""Layers of a rank as modules that PyTorch shards."""

from typing import Any

import pytest
import torch
from torch import nn

from windlass.engines.torch.stage import StageLayer


@pytest.mark.parametrize("name", ["weight", "forward", "layers.0.bias", "index"])
def test_a_weight_may_have_the_name_of_anything_that_a_module_has(name: str) -> None:
    weight, unused = nn.Parameter(torch.ones(2)), Any
    layer = StageLayer(3, unused, {name: weight}, (), unused, "none")  # type: ignore[arg-type]
    assert layer.weight(name) is weight
    assert (layer.index, [*layer.parameters()]) == (3, [weight])
