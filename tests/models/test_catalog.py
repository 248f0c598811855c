"""Catalog models are the published ones."""

import subprocess
import sys

import pytest

from windlass.errors import ModelError
from windlass.models import catalog
from windlass.models.build import build_layer_stack
from windlass.models.config import TransformerConfig

PUBLISHED = [name for name in catalog.model_names() if catalog.published_parameter_count(name)]


def owned_parameters(name: str) -> int:
    stack = build_layer_stack(name, {}, device="meta", seed=0)
    return sum(
        parameter.numel()
        for layer_name, layer in zip(stack.names, stack.layers, strict=True)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
        if f"{layer_name}.{path}" not in stack.tied_weights
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_catalog_model_has_the_published_number_of_parameters(name: str):
    published = catalog.published_parameter_count(name)
    assert published is not None

    # Papers print two or three digits, checkpoints all of them.
    tolerance = 0 if isinstance(published, int) else 0.02
    assert owned_parameters(name) == pytest.approx(published, rel=tolerance, abs=0)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_a_token_meets_the_published_number_of_parameters(name: str):
    config, published = catalog.model_config(name), catalog.published_active_parameters(name)
    assert isinstance(config, TransformerConfig)
    experts = config.experts
    assert experts is not None
    left_out = (experts.count - experts.per_token) * 3 * config.width * experts.ffn * config.layers

    # Mixtral's is from the table of its paper, 13 B; the others are printed with two digits.
    assert owned_parameters(name) - left_out == pytest.approx(published, rel=0.03)


def test_the_tiny_models_are_small_enough_for_two_cores():
    assert 1e6 <= owned_parameters("gpt-tiny") <= 3e6
    assert 1e6 <= owned_parameters("llama-tiny") <= 3e6


def test_every_entry_names_its_source():
    for name in catalog.model_names():
        config = catalog.resnet_config(name) or catalog.model_config(name)
        assert config.source


def test_an_unknown_name_suggests_the_nearest_and_how_to_name_a_file():
    with pytest.raises(ModelError, match=r"did you mean `gpt2-124m`.*`file\.py:function`"):
        catalog.model_config("gpt2-124")


def test_the_catalog_does_not_import_torch():
    code = (
        "import sys; from windlass.models import catalog; catalog.model_config('gpt3-175b'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
