"""The models known by name are the published ones."""

import subprocess
import sys

import pytest

from windlass.errors import ModelError
from windlass.models import catalog as catalogue
from windlass.models.build import build_layer_stack

PUBLISHED = [name for name in catalogue.model_names() if catalogue.published_parameter_count(name)]


def owned_parameters(name: str) -> int:
    chain = build_layer_stack(name, {}, device="meta", seed=0)
    return sum(
        parameter.numel()
        for layer_name, layer in zip(chain.names, chain.layers, strict=True)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
        if f"{layer_name}.{path}" not in chain.tied_weights
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_the_published_number_of_parameters(name: str):
    published = catalogue.published_parameter_count(name)
    assert published is not None

    # Papers print two or three digits, checkpoints all of them.
    tolerance = 0 if isinstance(published, int) else 0.02
    assert owned_parameters(name) == pytest.approx(published, rel=tolerance, abs=0)


def test_the_tiny_models_are_small_enough_for_two_cores():
    assert 1e6 <= owned_parameters("gpt-tiny") <= 3e6
    assert 1e6 <= owned_parameters("llama-tiny") <= 3e6


def test_every_entry_says_where_its_numbers_stand():
    assert all(catalogue.model_config(name).source for name in catalogue.model_names())


def test_an_unknown_name_is_answered_with_the_nearest_and_with_how_to_name_a_file():
    with pytest.raises(ModelError, match=r"did you mean `gpt2-124m`.*`file\.py:function`"):
        catalogue.model_config("gpt2-124")


def test_the_catalogue_answers_without_torch():
    code = (
        "import sys; from windlass.models import catalogue; catalogue.shape('gpt3-175b'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
