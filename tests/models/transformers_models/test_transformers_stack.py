"""Models of transformers as stacks of layers, by transformers' own code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tiny_transformers import ARCHITECTURES, tiny_folder, tiny_input, tiny_model
from windlass.errors import InputErrors, ModelError
from windlass.models.build import build_layer_stack, layer_stack_of
from windlass.models.catalog import is_causal, runs_by_transformers
from windlass.models.check_shardable import sharding_errors
from windlass.models.layer_stack import LayerStack, layer_sharding, materialize_layer
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.models.transformers_models.export_model import transformers_layout

FAST = ("olmo2", "deepseek_v3", "deberta-v2", "dinov2")


def real_layers(stack: LayerStack) -> list[nn.Module]:
    return [
        materialize_layer(stack, index, seed=0, device="cpu") for index in range(len(stack.layers))
    ]


def outputs(layers: list[nn.Module], x: Tensor) -> Tensor:
    with torch.no_grad():
        for layer in layers:
            x = layer(x)
    return x


def logits(model: Any, x: Tensor) -> Tensor:  # noqa: ANN401  of transformers
    with torch.no_grad():
        return model(**{model.main_input_name: x}).logits


@pytest.mark.parametrize(
    "model_type",
    [
        each if each in FAST else pytest.param(each, marks=pytest.mark.slow)
        for each in ARCHITECTURES
    ],
)
def test_the_layers_of_a_folder_give_the_logits_of_its_model(model_type: str, tmp_path: Path):
    name, model = tiny_folder(model_type, tmp_path)
    x = tiny_input(model)

    stack = build_layer_stack(name, {}, device="meta")

    assert torch.allclose(outputs(real_layers(stack), x), logits(model, x), rtol=1e-5, atol=1e-6)


def test_layers_that_compute_the_same_are_of_one_kind(tmp_path: Path):
    name, _ = tiny_folder("deepseek_v3", tmp_path)

    stack = build_layer_stack(name, {}, device="meta")

    _, dense, sparse, other_sparse, _ = stack.kinds
    assert dense != sparse == other_sparse


def test_blocks_that_see_another_window_are_of_another_kind():
    model = tiny_model("gemma3_text")
    model.config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = type(model)(model.config)

    stack = layer_stack_of(model, "mine", {}, device="cpu", seed=0)

    _, first, second, third, _ = stack.kinds
    assert first == third != second


def test_an_own_module_of_transformers_is_taken_apart():
    model = tiny_model("olmo2").eval()
    x = tiny_input(model)
    expected = logits(model, x)

    stack = layer_stack_of(model, "mine", {}, device="cpu", seed=0)

    assert torch.equal(outputs(list(stack.layers), x), expected)


def test_what_a_mask_hides_at_another_length_is_made_anew(tmp_path: Path):
    """Windows are longer than the run in which the model was studied."""
    name, model = tiny_folder("olmo3", tmp_path)
    x = torch.randint(3, 256, (1, 100))

    stack = build_layer_stack(name, {}, device="meta")

    assert torch.allclose(outputs(real_layers(stack), x), logits(model, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "by_transformers"),
    [
        ({"hidden_act": "relu"}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, True),
        ({"mup_scaling": 2.0}, False),
        ({}, False),
    ],
    ids=json.dumps,
)
def test_a_known_type_with_a_key_that_is_not_computed_here_runs_by_its_own_code(
    keys: dict[str, object], by_transformers: bool, tmp_path: Path
):
    tiny_folder("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))

    assert runs_by_transformers(f"hf:{tmp_path}") == by_transformers


def test_a_known_type_by_its_own_code_gives_the_logits_of_transformers(tmp_path: Path):
    _, model = tiny_folder("llama", tmp_path)
    model.config.hidden_act = "relu"
    model = type(model)(model.config).eval()
    model.save_pretrained(tmp_path)
    name, x = f"hf:{tmp_path}", tiny_input(model)

    stack = build_layer_stack(name, {}, device="meta")

    assert torch.allclose(outputs(real_layers(stack), x), logits(model, x), rtol=1e-5, atol=1e-6)


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))

    with pytest.raises(ModelError, match="`model_type` = 'unheard_of' is none that the installed"):
        build_layer_stack(f"hf:{tmp_path}", {}, device="meta")


def test_missing_and_unknown_tensors_are_named(tmp_path: Path):
    name, _ = tiny_folder("olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.wait"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(InputErrors) as caught:
        build_layer_stack(name, {}, device="meta")

    assert "has no `model.norm.weight`" in str(caught.value)
    assert "`model.norm.wait`" in str(caught.value)


def test_a_loss_made_of_all_routers_is_refused(tmp_path: Path):
    name, _ = tiny_folder("olmoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))

    with pytest.raises(ModelError, match="`output_router_logits` adds a loss"):
        build_layer_stack(name, {}, device="meta")


def test_a_hidden_state_that_is_not_passed_on_is_refused():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.head = nn.Linear(8, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            first = x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x + first)
            return self.head(x)

    from windlass.models.tracing.cut_module import cut_module
    from windlass.models.tracing.model_call import ModelCall

    with pytest.raises(ModelError, match=r"block `layers\.1` takes a hidden state made of"):
        cut_module(Skips(), "skips", call=ModelCall())


def test_whether_a_folder_writes_text_follows_from_its_class(tmp_path: Path):
    writer, _ = tiny_folder("olmo2", tmp_path / "writer")
    reader, _ = tiny_folder("electra", tmp_path / "reader")

    assert is_causal(writer)
    assert not is_causal(reader)


@pytest.mark.parametrize(
    "model_type",
    [
        each if each == "deepseek_v3" else pytest.param(each, marks=pytest.mark.slow)
        for each in ARCHITECTURES
    ],
)
def test_a_folder_is_written_back_as_it_was_read(model_type: str, tmp_path: Path):
    name, _ = tiny_folder(model_type, tmp_path)
    stack = build_layer_stack(name, {}, device="meta")
    stored = load_file(tmp_path / "model.safetensors")

    layout = transformers_layout(name, stack, tokenizer=None, special_tokens=None)
    parameters = [
        (f"{layer_name}.{path}", tensor)
        for layer_name, layer in zip(stack.names, real_layers(stack), strict=True)
        for path, tensor in layer.state_dict().items()
        if f"{layer_name}.{path}" not in stack.tied_weights
    ]
    written = dict(layout.tensors(parameters))

    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("smollm3", None),
        ("olmo2", None),  # `colwise_gather_output`
        ("deepseek_v3", None),  # `packed_colwise` of experts, and attention that is not sharded
        ("gemma", None),  # a tied embedding that is scaled
        ("stablelm", "has no `base_model_tp_plan` for its blocks"),
    ],
)
def test_a_plan_of_shards_is_taken_or_its_style_named(
    model_type: str, reason: str | None, tmp_path: Path
):
    name, _ = tiny_folder(model_type, tmp_path)

    errors = sharding_errors(build_layer_stack(name, {}, device="meta"), 2)

    assert not errors if reason is None else reason in errors[0]


def test_a_style_that_is_not_known_is_named():
    model = tiny_model("olmo2")
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "spiral"}

    errors = sharding_errors(layer_stack_of(model, "mine", {}, device="cpu", seed=0), 2)

    assert "its own plan shards `model.layers.0.mlp.up_proj` as `spiral`" in errors[0]


def test_every_rank_has_its_half_of_each_expert(tmp_path: Path):
    name, _ = tiny_folder("deepseek_v3", tmp_path)
    stack = build_layer_stack(name, {}, device="meta")

    shards = param_shards(stack.layers[2], layer_sharding(stack, 2), TensorParallelRank(degree=2))

    gate_and_up, down = shards["mlp.experts.gate_up_proj"], shards["mlp.experts.down_proj"]
    assert gate_and_up.ranges == (None, ((0, 16), (32, 48)), None)
    assert down.ranges == (None, None, ((0, 16),))
    assert not shards["mlp.gate.weight"].is_sharded


def test_one_file_counts_before_an_index_as_in_transformers(tmp_path: Path):
    name, model = tiny_folder("olmo2", tmp_path)
    other = {key: tensor + 1 for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(other, tmp_path / "shard.safetensors")
    index = {"weight_map": dict.fromkeys(other, "shard.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    layer = materialize_layer(build_layer_stack(name, {}, device="meta"), 0, seed=0, device="cpu")

    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(layer.weight, loaded.get_input_embeddings().weight)


@pytest.mark.slow
def test_a_model_is_built_without_a_word_of_the_packages_that_its_library_imports(tmp_path: Path):
    name, _ = tiny_folder("olmo2", tmp_path)
    code = (
        "from windlass.models.build import build_layer_stack; "
        f"build_layer_stack({name!r}, {{}}, device='meta')"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not run.stdout
    assert not run.stderr
