"""A head of new classes is trained whole beside adapters, as PEFT's `modules_to_save` are."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import windlass
from api.training.test_adapter_files import STEPS, hashes
from windlass.data.tokenizer import byte_tokenizer
from windlass.errors import ModelError
from windlass.jobs.planned import make_request
from windlass.models.adapter_files.peft_adapter import linear_layers, peft_adapter
from windlass.models.build import build_layer_stack
from windlass.models.catalog import apply_model_arguments, model_config

ROUNDING = 1e-5
"""Two products in place of one round differently in float32."""
CLASSES = 5
SIZES: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 7},
    "bert": {"vocab_size": 260, "max_position_embeddings": 32, "num_labels": 3},
}
TARGETS = {"vit": ["q_proj", "v_proj", "fc2"], "bert": ["query", "value"]}
TRAINED = {
    "vit": ("head.projection.bias", "head.projection.weight"),
    "bert": ("head.texts.classes.bias", "head.texts.classes.weight"),
}

# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def classifier(folder: Path, **changes: object) -> nn.Module:
    """What transformers makes of a folder, perhaps with other classes."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    is_vit = json.loads((folder / "config.json").read_text())["model_type"] == "vit"
    auto = AutoModelForImageClassification if is_vit else AutoModelForSequenceClassification
    return auto.from_pretrained(folder, ignore_mismatched_sizes=True, **changes).eval()


def base(path: Path, kind: str) -> Path:
    """A folder with a head of its own classes."""
    from transformers import AutoConfig
    from transformers.models.bert import BertForSequenceClassification
    from transformers.models.vit import ViTForImageClassification

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        **SIZES[kind],
    )  # fmt: skip
    model = {"vit": ViTForImageClassification, "bert": BertForSequenceClassification}[kind]
    model(config).save_pretrained(path)
    if kind == "bert":
        byte_tokenizer().save(path / "tokenizer.json")
    return path


def inputs(kind: str) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 1, 8, 8) if kind == "vit" else torch.randint(0, 250, (3, 16))


@pytest.mark.parametrize("kind", [pytest.param("vit", marks=pytest.mark.slow), "bert"])
def test_a_head_that_peft_saved_whole_is_read_and_written_as_it_was(home: Path, kind: str):
    from peft import LoraConfig, get_peft_model

    folder = base(home / "base", kind)
    model = get_peft_model(
        classifier(folder, num_labels=CLASSES),
        LoraConfig(r=2, target_modules=TARGETS[kind], modules_to_save=["classifier"]),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                weight.normal_(std=0.1)
        model.save_pretrained(home / "adapter")
        expected = model(inputs(kind)).logits

    request = make_request(f"hf:{folder}", f"lora.adapter={home / 'adapter'}")
    assert request.lora is not None
    assert request.lora.trained == TRAINED[kind]
    assert request.model.classes == CLASSES
    stack = build_layer_stack(f"hf:{folder}", {"classes": CLASSES}, device="cpu", lora=request.lora)
    x = inputs(kind)
    with torch.no_grad():
        for layer in stack.layers:
            x = layer(x)
    torch.testing.assert_close(x, expected, rtol=ROUNDING, atol=ROUNDING)
    config = apply_model_arguments(model_config(f"hf:{folder}"), {"classes": CLASSES})
    writer, weights = (
        peft_adapter(config, stack, request.lora),
        {
            f"{name}.{path}": weight.detach()
            for name, layer in zip(stack.names, stack.layers, strict=True)
            for path, weight in layer.named_parameters()
        },
    )
    written: dict[str, Tensor] = {}
    for linear in linear_layers(stack, adapted=True):
        factors = (weights[f"{linear}.lora_{each}"] for each in "ab")
        written |= writer.tensors(linear, *factors)
    for weight in writer.whole:
        written |= writer.whole_tensors(weight, weights[weight])
    before = load_file(home / "adapter" / "adapter_model.safetensors")
    assert before.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in before.items())
    assert writer.content(written)["modules_to_save"] == ["classifier"]


def test_a_head_that_does_not_fit_is_one_clear_error(home: Path):
    folder = base(home / "base", "bert")
    (home / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "modules_to_save": ["classifier"]}
    (home / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.bert.encoder.layer.0.attention.self.query"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(2, 32), f"{module}.lora_B.weight": torch.ones(32, 2),
        "base_model.model.classifier.weight": torch.ones(CLASSES, 32),
    }  # fmt: skip
    save_file(tensors, home / "adapter" / "adapter_model.safetensors")
    words = (f"hf:{folder}", f"lora.adapter={home / 'adapter'}")
    with pytest.raises(ModelError, match=r"\[5, 32\] where \[4, 32\] fits"):
        make_request(*words, "model.classes=4")


def test_a_weight_to_train_that_the_model_lacks_is_refused_by_name():
    with pytest.raises(ModelError, match=r"`lora\.trained` has `head\.nothing`, and no weight of"):
        windlass.plan(
            "bert-tiny", "model.classes=3", "lora.rank=2", 'lora.trained=["head.nothing"]'
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_a_new_head_is_trained_beside_adapters_and_taken_home(home: Path, kind: str):
    from peft import PeftModel

    folder, draw = base(home / "base", kind), random.Random(0)
    before = hashes(folder)
    data = ["data.source=digits"]
    if kind == "bert":
        rows = [{"text": draw.choice("abcde") * 9, "label": n % CLASSES} for n in range(60)]
        (home / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = ["data.format=classes", f"data.source={home / 'rows.jsonl'}", "train.sequence=16"]
    classes = CLASSES if kind == "bert" else 10
    settings = [word for word in STEPS if not word.startswith("train.sequence")]
    run = windlass.train(
        f"hf:{folder}", *settings, *data, f"model.classes={classes}", "lora.rank=3",
        root=home / "runs",
    )  # fmt: skip
    list(run)
    assert any("draws the head anew" in note for note in run.planned.notes)
    assert any("whole, beside the adapters" in note for note in run.planned.notes)

    windlass.export(run.folder, to=f"peft:{home / 'adapter'}")
    windlass.export(run.folder, to=f"hf:{home / 'merged'}")

    x = inputs(kind)
    with torch.no_grad():
        merged = classifier(home / "merged")(x).logits
        plain = classifier(folder, num_labels=classes)
        adapted = PeftModel.from_pretrained(plain, home / "adapter").eval()(x).logits
    assert merged.shape == (3, classes)
    torch.testing.assert_close(adapted, merged, rtol=ROUNDING, atol=ROUNDING)
    assert hashes(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("pins", [("parallel.tensor=2",), ("parallel.pipeline=2",), ("phases=3",)])
def test_a_head_beside_adapters_is_trained_alike_under_any_plan(home: Path, pins: tuple[str, ...]):
    folder = base(home / "base", "vit")
    assert windlass.check(
        f"hf:{folder}", "model.classes=10", "lora.rank=2", "train.batch=8", "batch.micro=4", *pins
    )
