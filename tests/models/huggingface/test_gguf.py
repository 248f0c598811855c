"""What a GGUF file says of a model beside its weights."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from windlass.data.tokenizer import byte_tokenizer
from windlass.errors import InputErrors, ModelError
from windlass.models.catalog import model_config
from windlass.models.config import TransformerConfig
from windlass.models.huggingface.export_layout import ExportLayout
from windlass.models.huggingface.families import find_family
from windlass.models.huggingface.gguf_layout import GgufLayout, gguf_layout
from windlass.models.huggingface.gguf_vocabulary import gguf_vocabulary
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import StoredTensor
from windlass.models.positions.rope_scaling import RopeScaling

BYTES = byte_tokenizer().backend.to_str()


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


def test_a_whole_number_of_a_config_is_written_as_the_fraction_that_readers_ask_for():
    scaling = RopeScaling(type="linear", factor=4)
    config = replace(model_config("llama3-8b"), rotary_base=1000000, rope_scaling=scaling)

    keys = layout(config, "llama").keys

    whole = {name for name, value in keys.items() if type(value) is int}
    assert not whole & {"llama.rope.freq_base", "llama.rope.scaling.factor"}
    assert keys["llama.rope.freq_base"] == 1e6


def test_the_folder_of_a_model_is_named_without_the_way_to_it(tmp_path: Path):
    folder = tmp_path / "somebody" / "my-llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    for name in (f"hf:{folder}", f"hf:{folder / 'config.json'}"):
        assert layout(replace(model_config("llama3-8b"), name=name), "llama").name == "my-llama"


def test_a_weight_too_large_for_the_type_of_its_folder_is_refused():
    names = TensorNames(family=find_family("llama"), config=model_config("llama3-8b"))
    stored = StoredTensor(Path("model.safetensors"), (1, 1), "F16", 0, 2)
    base = {"model.layers.0.self_attn.o_proj.weight": stored}
    written = gguf_layout(ExportLayout(names=names, files={}, base=base))

    ((_, kept),) = written.tensors("block0.attention.output.weight", torch.tensor([[65504.0]]))
    assert kept.dtype == torch.float16
    with pytest.raises(ModelError, match="cannot hold"):
        list(written.tensors("block0.attention.output.weight", torch.tensor([[65536.0]])))


def test_learned_positions_are_float32_whatever_their_folder_has():
    names = TensorNames(family=find_family("gpt2"), config=model_config("gpt2-124m"))
    stored = StoredTensor(Path("model.safetensors"), (1, 1), "F16", 0, 2)
    base = {f"transformer.{name}.weight": stored for name in ("wte", "wpe")}
    written = gguf_layout(ExportLayout(names=names, files={}, base=base))

    types = {
        name: value.dtype
        for parameter in ("tokens", "positions")
        for name, value in written.tensors(f"embedding.{parameter}.weight", torch.ones(1, 1))
    }
    assert types == {"token_embd.weight": torch.float16, "position_embd.weight": torch.float32}


def bytes_with(**changes: object) -> dict[str, bytes]:
    """The tokenizer of bytes with other parts."""
    return {"tokenizer.json": json.dumps(json.loads(BYTES) | changes).encode()}


def test_ids_beyond_the_tokenizer_are_unused_tokens():
    vocabulary = gguf_vocabulary(bytes_with(), 260)

    assert vocabulary is not None
    assert vocabulary.words == "gpt-2"
    assert vocabulary.tokens[256:] == ("<|endoftext|>", "[PAD257]", "[PAD258]", "[PAD259]")
    # `gguf.TokenType`: normal 1, control 3, unused 5.
    assert vocabulary.types[255:] == (1, 3, 5, 5, 5)


def test_a_tokenizer_without_merges_gets_one_that_no_text_has():
    """llama.cpp loads no byte-level BPE without merges."""
    vocabulary = gguf_vocabulary(bytes_with(), 257)

    assert vocabulary is not None
    (merge,) = vocabulary.merges
    assert not any(part in vocabulary.tokens for part in merge.split(" "))


@pytest.mark.parametrize(
    ("token", "index", "message"),
    [("<|new|>", 258, "as id 258, and the model has 258 entries"),
     ("A", 257, "`A` under 2 ids"), ("<|new|>", -1, "as id -1")],
)  # fmt: skip
def test_a_token_that_a_file_cannot_have_is_refused(token: str, index: int, message: str):
    added = [{"content": token, "id": index, "special": True}]

    with pytest.raises(ModelError, match=message):
        gguf_vocabulary(bytes_with(added_tokens=added), 258)


def test_an_added_token_in_the_marks_of_a_special_one_steers_the_model():
    texts = ("<|tool|>", "<tool>", "</s>")
    added = [{"content": t, "id": 257 + i, "special": i == 2} for i, t in enumerate(texts)]

    vocabulary = gguf_vocabulary(bytes_with(added_tokens=added), 260)

    assert vocabulary is not None
    # Control 3, user-defined 4.
    assert vocabulary.types[257:] == (3, 4, 3)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Source: the `tokenizer.json` of Llama 3."""
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(behavior: str = "Isolated", **changes: object) -> dict[str, object]:
    """Words as Llama 3 splits them."""
    first = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": behavior, "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, LEVEL | {"use_regex": False} | changes]}


@pytest.mark.parametrize(("takes_whole", "words"), [(True, "llama-bpe"), (False, "smaug-bpe")])
def test_words_of_llama_3_that_are_tokens_are_whole_if_its_tokenizer_says_so(
    takes_whole: bool, words: str
):
    model = json.loads(BYTES)["model"] | {"ignore_merges": takes_whole}

    vocabulary = gguf_vocabulary(bytes_with(model=model, pre_tokenizer=split()), 257)

    assert vocabulary is not None
    assert vocabulary.words == words


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": LEVEL | {"add_prefix_space": True}},
        {"pre_tokenizer": LEVEL | {"use_regex": False}},
        {"pre_tokenizer": split("Removed")},
        {"pre_tokenizer": split(use_regex=True)},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": True}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "</w>"}},
        {"model": {"type": "WordPiece", "vocab": {}}},
    ],
)
def test_a_tokenizer_that_has_no_name_there_is_refused(changes: dict[str, object]):
    with pytest.raises(ModelError, match="no byte-level BPE that splits words as"):
        gguf_vocabulary(bytes_with(**changes), 260)


def test_tokens_that_begin_and_end_are_those_of_the_tokenizer():
    """`tokenizer_config.json` says that `<|eot|>` ends an answer."""
    texts = ("<|b|>", "<|end|>", "<|eot|>")
    added = [{"content": t, "id": 257 + i, "special": True} for i, t in enumerate(texts)]
    single = [{"SpecialToken": {"id": "<|b|>", "type_id": 0}}, {"Sequence": {"id": "A"}}]
    begins = {"type": "TemplateProcessing", "single": single}
    after = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, begins]}
    template = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    beside = {"bos_token": "<|b|>", "eos_token": {"content": "<|eot|>"}, "chat_template": template}
    files = bytes_with(added_tokens=added, post_processor=after) | {
        "config.json": json.dumps({"bos_token_id": 257, "eos_token_id": [258, 259]}).encode(),
        "tokenizer_config.json": json.dumps(beside).encode(),
    }

    vocabulary = gguf_vocabulary(files, 260)

    assert vocabulary is not None
    assert vocabulary.settings == {
        "bos_token_id": 257, "add_bos_token": True, "eos_token_id": 259, "add_eos_token": False,
        "chat_template": "b",
    }  # fmt: skip


def test_no_token_begins_a_prompt_that_the_tokenizer_does_not_add():
    config = json.dumps({"bos_token_id": 256, "eos_token_id": [256, 3]}).encode()

    vocabulary = gguf_vocabulary(bytes_with() | {"config.json": config}, 257)

    assert vocabulary is not None
    assert vocabulary.settings == {
        "bos_token_id": 256, "add_bos_token": False, "eos_token_id": 256, "add_eos_token": False,
    }  # fmt: skip
