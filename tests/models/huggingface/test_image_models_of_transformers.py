"""ViT and ResNet folders of Hugging Face, beside the modules of `transformers` itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from windlass.errors import InputErrors, ModelError
from windlass.models.build import build_layer_stack
from windlass.models.catalog import is_residual, model_config, resnet_config
from windlass.models.huggingface.export_layout import ExportLayout, export_layout
from windlass.models.huggingface.image_processor import ModelConfig, image_processor
from windlass.models.huggingface.write_config import config_content
from windlass.models.layer_stack import LayerStack

ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 8, "patch_size": 2,
}  # fmt: skip
STAGES: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "vit": ("vit", {**ATTENTION, "num_labels": 7}, (3, 8, 8)),
    "vit-oblong": (
        "vit",
        {**ATTENTION, "image_size": [8, 4], "num_channels": 1, "hidden_act": "gelu_new"},
        (1, 8, 4),
    ),
    "resnet": ("resnet", {**STAGES, "num_labels": 7}, (3, 40, 24)),
    "resnet-basic": (
        "resnet",
        {**STAGES, "layer_type": "basic", "downsample_in_first_stage": True, "num_channels": 1},
        (1, 32, 32),
    ),
}
CLASSES = {"vit": "vocabulary", "resnet": "classes"}
"""Field of our configuration."""
PROCESSOR = {
    "size": 12, "crop_pct": 0.875, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.5],
}  # fmt: skip


def saved(name: str, folder: Path, **changes: object) -> nn.Module:
    """A `transformers` model with random weights and running statistics, none of them usual."""
    from transformers import AutoConfig, AutoModelForImageClassification

    model_type, sizes, _ = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageClassification.from_config(config).eval()
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if path.endswith("num_batches_tracked"):
                tensor.data.fill_(3)
            elif path.endswith("running_var"):
                tensor.data.uniform_(0.5, 1.5)
            else:
                tensor.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def config_of(folder: Path) -> ModelConfig:
    return resnet_config(f"hf:{folder}") or model_config(f"hf:{folder}")


def logits(stack: LayerStack, images: Tensor) -> Tensor:
    x = images
    for layer in stack.layers:
        x = layer.eval()(x)
    return x


def written_by(layout: ExportLayout, stack: LayerStack) -> dict[str, Tensor]:
    """What is written of the weights that a stack reads."""
    assert stack.weights is not None
    names = [
        f"{name}.{path}"
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, _ in (*layer.named_parameters(), *layer.named_buffers())
    ]
    return dict(layout.tensors((name, stack.weights.read(name)) for name in names))


@pytest.mark.parametrize("name", MODELS)
def test_classes_of_images_are_those_of_transformers(name: str, tmp_path: Path):
    model = saved(name, tmp_path)
    torch.manual_seed(1)
    images = torch.randn(3, *MODELS[name][2])

    with torch.no_grad():
        expected = model(images).logits
        mine = logits(build_layer_stack(f"hf:{tmp_path}", {}, device="cpu"), images)

    # Both sum the same products in float32, in another order.
    assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_and_statistic_is_written_as_it_was_read(name: str, tmp_path: Path):
    saved(name, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    stack = build_layer_stack(f"hf:{tmp_path}", {}, device="meta")

    layout = export_layout(config_of(tmp_path), stack.tied_weights, tokenizer=None)
    written = written_by(layout, stack)

    theirs = load_file(tmp_path / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[tensor], value) for tensor, value in theirs.items())
    assert all(written[tensor].dtype == value.dtype for tensor, value in theirs.items())
    for file in ("config.json", "preprocessor_config.json"):
        assert layout.files[file] == (tmp_path / file).read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_images_that_is_written_anew_says_the_same_model(name: str, tmp_path: Path):
    from transformers import AutoConfig

    saved(name, tmp_path)
    config = config_of(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)

    _, content = config_content(config)
    (tmp_path / "config.json").write_text(json.dumps(content))

    assert config_of(tmp_path) == config
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.id2label, again.label2id) == (theirs.id2label, theirs.label2id)


def test_a_residual_network_in_bfloat16_keeps_its_statistics_wide(tmp_path: Path):
    model = saved("resnet", tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    stack = build_layer_stack(f"hf:{tmp_path}", {}, device="cpu")
    layout = export_layout(config_of(tmp_path), {}, tokenizer=None)

    buffers = dict(stack.layers[0].named_buffers())
    assert buffers["input.norm.running_mean"].dtype == torch.float32
    ours = {
        f"{name}.{path}": tensor
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, tensor in (*layer.named_parameters(), *layer.named_buffers())
    }
    written = dict(layout.tensors(ours.items()))
    theirs = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[tensor], value) for tensor, value in theirs.items())


def test_pixels_are_those_that_the_processor_makes(tmp_path: Path):
    from transformers import ViTImageProcessor

    saved("vit", tmp_path)
    processor = ViTImageProcessor(
        size={"height": 8, "width": 8}, rescale_factor=1 / 128,
        image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.5],
    )  # fmt: skip
    processor.save_pretrained(tmp_path)
    torch.manual_seed(2)
    pixels = torch.randint(256, (3, 8, 8), dtype=torch.uint8)

    ours = image_processor(f"hf:{tmp_path}")

    assert ours is not None
    mean, std = (torch.tensor(each)[:, None, None] for each in (ours.mean, ours.std))
    theirs = processor(pixels, return_tensors="pt")["pixel_values"][0]
    assert torch.allclose((pixels / 255 - mean) / std, theirs, atol=1e-5)
    assert ours.sides == (8, 8)


def test_a_residual_network_takes_images_of_the_size_that_its_processor_makes(tmp_path: Path):
    saved("resnet", tmp_path)
    assert config_of(tmp_path).image == (3, 224, 224)

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))

    assert config_of(tmp_path).image == (3, 12, 12)
    assert is_residual(f"hf:{tmp_path}")
    stack = build_layer_stack(f"hf:{tmp_path}", {"input_shape": (3, 20, 28)}, device="meta")
    assert stack.examples is not None
    assert stack.examples.inputs == (3, 20, 28)


def test_what_our_layers_do_not_compute_is_refused_by_name(tmp_path: Path):
    saved("resnet", tmp_path, downsample_in_bottleneck=True, hidden_act="gelu")
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "depths": [1.5, 2]}))

    with pytest.raises(ModelError) as error:
        resnet_config(f"hf:{tmp_path}")

    for word in ("`downsample_in_bottleneck` is true", '`hidden_act` is "gelu"', "`depths` is"):
        assert word in str(error.value)


def test_a_statistic_that_is_missing_is_named(tmp_path: Path):
    saved("resnet", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    statistic = "resnet.embedder.embedder.normalization.running_mean"
    del tensors[statistic]
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(InputErrors, match=f"has no `{statistic}`"):
        build_layer_stack(f"hf:{tmp_path}", {}, device="cpu")


def test_a_processor_whose_numbers_do_not_go_together_is_refused(tmp_path: Path):
    saved("vit", tmp_path)
    wrong = {**PROCESSOR, "image_std": [0.2, 0.0, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(wrong))

    with pytest.raises(ModelError, match=r"preprocessor_config.json` cannot be read: `image_mean`"):
        image_processor(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_a_head_for_other_classes_is_drawn_anew_on_the_weights_of_a_folder(
    name: str, tmp_path: Path
):
    from transformers import AutoModelForImageClassification

    model = saved(name, tmp_path / "seven")
    hub = f"hf:{tmp_path / 'seven'}"
    stacks = [
        build_layer_stack(hub, {"classes": 10}, device="cpu", seed=seed) for seed in (0, 0, 1)
    ]
    heads = [stack.layers[-1].projection.weight for stack in stacks]
    assert heads[0].shape[0] == 10
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])

    config = replace(config_of(tmp_path / "seven"), **{CLASSES[name]: 10})
    layout = export_layout(config, {}, tokenizer=None)
    parameters = {
        f"{layer_name}.{path}": tensor.detach()
        for layer_name, layer in zip(stacks[0].names, stacks[0].layers, strict=True)
        for path, tensor in (*layer.named_parameters(), *layer.named_buffers())
    }
    (tmp_path / "ten").mkdir()
    save_file(dict(layout.tensors(parameters.items())), tmp_path / "ten" / "model.safetensors")
    for file, content in layout.files.items():
        (tmp_path / "ten" / file).write_bytes(content)
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "ten").eval()
    images = torch.randn(3, *MODELS[name][2])
    with torch.no_grad():
        assert torch.allclose(theirs(images).logits, logits(stacks[0], images), atol=1e-5)
    body = dict(model.base_model.named_parameters())
    assert all(torch.equal(p, body[n]) for n, p in theirs.base_model.named_parameters())


def test_the_classes_of_the_folder_keep_its_head(tmp_path: Path):
    model = saved("vit", tmp_path)
    stack = build_layer_stack(f"hf:{tmp_path}", {"classes": 7}, device="cpu", seed=0)
    assert torch.equal(stack.layers[-1].projection.weight, model.classifier.weight)
