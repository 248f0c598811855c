"""What a GGUF file says of a model beside its weights."""

import json
import math
from dataclasses import replace

import pytest

from windlass.data.tokenizer import byte_tokenizer
from windlass.errors import InputErrors, ModelError
from windlass.models.catalog import model_config
from windlass.models.config import TransformerConfig
from windlass.models.huggingface.export_layout import ExportLayout
from windlass.models.huggingface.families import find_family
from windlass.models.huggingface.gguf_layout import GgufLayout, gguf_layout
from windlass.models.huggingface.gguf_vocabulary import gguf_vocabulary
from windlass.models.huggingface.tensor_layouts import TensorNames


def layout(config: TransformerConfig, model_type: str) -> GgufLayout:
    names = TensorNames(family=find_family(model_type), config=config)
    return gguf_layout(ExportLayout(names=names, files={}))


def test_scaled_positions_of_llama_are_a_tensor_of_factors():
    config = model_config("llama3.1-8b")

    ((name, factors),) = layout(config, "llama").constants()

    assert name == "rope_freqs.weight"
    # Llama's own formula, angle by angle. Source: meta-llama/llama-models, `apply_scaling`.
    for index, factor in enumerate(factors.tolist()):
        wavelength = 2 * math.pi * 500000 ** (2 * index / 128)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        smooth = min(1.0, max(0.0, smooth))
        assert factor == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-5)


def test_what_no_key_says_is_refused_by_name():
    config = replace(model_config("llama3-8b"), activation="gelu", qk_norm=True)

    with pytest.raises(InputErrors) as error:
        layout(config, "llama")

    assert [message.split("`")[1] for message in error.value.messages] == ["qk_norm", "activation"]


def test_other_types_are_refused():
    with pytest.raises(ModelError, match="of which no GGUF file is written"):
        layout(model_config("bert-base"), "bert")


def test_ids_beyond_the_tokenizer_are_unused_tokens():
    tokenizer = byte_tokenizer().backend.to_str().encode()

    vocabulary = gguf_vocabulary(tokenizer, 260)

    assert vocabulary.words == "gpt-2"
    assert vocabulary.tokens[256:] == ("<|endoftext|>", "[PAD257]", "[PAD258]", "[PAD259]")
    # `gguf.TokenType`: normal 1, control 3, unused 5.
    assert vocabulary.types[255:] == (1, 3, 5, 5, 5)


def test_a_tokenizer_that_has_no_name_there_is_refused():
    content = json.loads(byte_tokenizer().backend.to_str())
    content["pre_tokenizer"] = {"type": "Metaspace"}

    with pytest.raises(ModelError, match="no byte-level BPE that splits words as"):
        gguf_vocabulary(json.dumps(content).encode(), 260)
