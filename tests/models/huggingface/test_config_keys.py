"""Keys of a `config.json`: what changes nothing is read and kept, what changes sums is not."""

import json
from pathlib import Path

import pytest
import torch

from windlass.errors import ModelError
from windlass.models import export_layout, model_config
from windlass.models.huggingface.families import find_family, model_types

BASE: dict[str, object] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip
HARMLESS: list[dict[str, object]] = [
    {"_attn_implementation": "sdpa", "attn_implementation": "eager"},
    {"layer_types": ["full_attention"] * 2, "max_window_layers": 2},
    {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    {"partial_rotary_factor": 1.0, "hidden_act": "swish"},
    {"unsloth_fixed": True, "unsloth_version": "2026.1", "_commit_hash": "abc"},
    {"max_sequence_length": 256, "model_max_length": 256, "neftune_noise_alpha": 5},
    {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_length": 20},
    {"is_decoder": True, "num_labels": 2, "ignore_index": -100, "use_bfloat16": True},
    {"note_of_a_person": "trained on a Monday", "tags": ["a", "b"]},
]


def written(folder: Path, **keys: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | keys))
    return f"hf:{folder}/config.json"


@pytest.mark.parametrize("keys", HARMLESS, ids=lambda keys: next(iter(keys)))
def test_a_key_that_changes_nothing_is_read_and_stands_in_the_export(
    keys: dict[str, object], tmp_path: Path
):
    plain = model_config(written(tmp_path / "plain"))
    config = model_config(written(tmp_path / "keys", **keys))

    shapes = [{**vars_of(each), "name": "", "source": ""} for each in (plain, config)]
    assert shapes[0] == shapes[1]
    exported = json.loads(export_layout(config, {}, tokenizer=None).files["config.json"])
    own = {name: exported.get(name) for name in keys if name != "rope_parameters"}
    assert own == {name: value for name, value in keys.items() if name != "rope_parameters"}


def vars_of(config: object) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(config)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "keys",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"mup_scaling": 1.0},
        {"use_qk_norm": True},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=json.dumps,
)
def test_a_key_that_may_change_sums_is_refused_by_name(keys: dict[str, object], tmp_path: Path):
    with pytest.raises(ModelError, match=next(iter(keys))):
        model_config(written(tmp_path, **keys))


def test_transformers_computes_the_same_with_each_key_that_is_called_harmless(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    def logits(folder: Path) -> torch.Tensor:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        with torch.no_grad():
            return model(torch.arange(12)[None]).logits

    written(tmp_path / "plain")
    expected = logits(tmp_path / "plain")
    for number, keys in enumerate(HARMLESS):
        written(tmp_path / str(number), **keys)
        assert torch.equal(logits(tmp_path / str(number)), expected), keys


def test_each_key_of_transformers_own_classes_is_known_to_its_family():
    from transformers import AutoConfig, GenerationConfig

    drawn = set(GenerationConfig().to_dict()) - {"_from_model_config"}
    for model_type in model_types():
        family = find_family(model_type)
        known = family.unread_keys | family.only.keys() | family.harmless.keys()
        known = known.union(*(rule.keys for rule in family.fields.values()))
        known |= {key.partition(".")[0] for key in known}
        theirs = set(AutoConfig.for_model(model_type).to_dict())
        values = AutoConfig.for_model(model_type).to_dict()
        missing = {key for key in theirs | drawn if key not in known and values.get(key)}
        assert not missing, (model_type, missing)


SCALED: list[dict[str, object]] = [
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions_are_exported_by_the_names_of_transformers_4_and_5(
    key: str, scaling: dict[str, object], tmp_path: Path
):
    both = {"rope_theta": 1e4} if key == "rope_parameters" else {}
    config = model_config(written(tmp_path, **{key: scaling | both}))
    exported = json.loads(export_layout(config, {}, tokenizer=None).files["config.json"])
    for name in ("rope_scaling", "rope_parameters"):
        assert {part: exported[name].get(part) for part in scaling} == scaling
    assert exported["rope_theta"] == exported["rope_parameters"]["rope_theta"] == 1e4


def test_positions_that_are_not_scaled_are_exported_without_a_scaling(tmp_path: Path):
    config = model_config(written(tmp_path))
    exported = json.loads(export_layout(config, {}, tokenizer=None).files["config.json"])
    assert exported.get("rope_scaling") is None
