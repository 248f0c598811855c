"""BERT with a sentence head, beside the modules of `transformers` itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from windlass.models.build import build_layer_stack
from windlass.models.catalog import apply_model_arguments, model_config
from windlass.models.huggingface.export_layout import export_layout
from windlass.models.huggingface.image_processor import class_names
from windlass.models.huggingface.write_config import config_content
from windlass.models.layer_stack import LayerStack
from windlass.models.loss import layer_loss
from windlass.models.sentences import HeadOutputs

VOCABULARY, SEQUENCE = 64, 20
ROUNDING = 1e-5
"""Both sum the same products in float32, in another order."""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A `BertForPreTraining` with random weights, and its folder."""
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=24,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bert")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForPreTraining._from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return model, folder


def run(stack: LayerStack, x: Tensor) -> HeadOutputs:
    for layer in stack.layers:
        x = layer.eval()(x)
    return x


def pairs() -> tuple[Tensor, Tensor]:
    """Tokens and their segments, of which the second begins in another place in each row."""
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % VOCABULARY
    return tokens, (torch.arange(SEQUENCE) > torch.tensor([[11], [7]])).long()


def tensors_of(stack: LayerStack, name: str) -> dict[str, Tensor]:
    """What is written of a stack with the weights of a folder."""
    layout = export_layout(model_config(name), stack.tied_weights, tokenizer=None)
    assert stack.weights is not None
    return dict(
        layout.tensors(
            (parameter, stack.weights.read(parameter))
            for layer_name, layer in zip(stack.names, stack.layers, strict=True)
            for path, _ in layer.named_parameters()
            if (parameter := f"{layer_name}.{path}") not in stack.tied_weights
        )
    )


def test_logits_of_both_heads_are_those_of_transformers(pretrained: tuple[nn.Module, Path]) -> None:
    model, folder = pretrained
    tokens, segments = pairs()
    with torch.no_grad():
        theirs = model(tokens, token_type_ids=segments)
        ours = run(build_layer_stack(f"hf:{folder}", {}, device="cpu"), tokens + 64 * segments)
    expected = theirs.prediction_logits, theirs.seq_relationship_logits
    for mine, their in zip((ours.tokens, ours.sentences[:, 0]), expected, strict=True):
        assert torch.allclose(mine, their, atol=ROUNDING, rtol=ROUNDING)
        assert their.std() > 0.05


def test_both_losses_together_are_that_of_transformers(pretrained: tuple[nn.Module, Path]) -> None:
    model, folder = pretrained
    tokens, segments = pairs()
    labels = torch.full_like(tokens, -100)
    labels[0, :5], labels[1, 9] = tokens[0, 5:10], 3
    follows = torch.tensor([0, 1])
    stack = build_layer_stack(f"hf:{folder}", {}, device="cpu")
    with torch.no_grad():
        whole = model(
            tokens, token_type_ids=segments, labels=labels, next_sentence_label=follows
        ).loss
        targets = torch.cat((labels, follows[:, None], torch.full((2, 2), -100)), dim=1)
        outputs = run(stack, tokens + 64 * segments)
        of_tokens, of_pairs, right = layer_loss(stack.layers[-1])(outputs, targets)
    assert of_tokens + of_pairs == pytest.approx(float(whole), rel=ROUNDING)
    expected = (outputs.sentences[:, 0].argmax(dim=-1) == follows).float().mean()
    assert right == expected


def test_every_tensor_and_the_class_are_written_as_they_were_read(
    pretrained: tuple[nn.Module, Path],
) -> None:
    name = f"hf:{pretrained[1]}"
    written = tensors_of(build_layer_stack(name, {}, device="meta"), name)
    theirs = load_file(pretrained[1] / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[tensor], value) for tensor, value in theirs.items())
    assert config_content(model_config(name))[1]["architectures"] == ["BertForPreTraining"]


def test_the_sentence_head_of_a_folder_may_be_left_out(pretrained: tuple[nn.Module, Path]) -> None:
    model, folder = pretrained
    tokens, _ = pairs()
    stack = build_layer_stack(f"hf:{folder}", {"sentence_head": False}, device="cpu")
    with torch.no_grad():
        assert torch.allclose(
            run(stack, tokens), model(tokens).prediction_logits, atol=ROUNDING, rtol=ROUNDING
        )


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A `BertForSequenceClassification` of three named classes, and its folder."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=24, id2label={0: "no", 1: "yes", 2: "both"},
        label2id={"no": 0, "yes": 1, "both": 2},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("classifier")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForSequenceClassification._from_config(config, attn_implementation="eager")
        for parameter in model.eval().parameters():
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return model, folder


def test_logits_of_classes_are_those_of_transformers_with_and_without_fill(
    classifier: tuple[nn.Module, Path],
) -> None:
    model, folder = classifier
    tokens, segments = pairs()
    stack = build_layer_stack(f"hf:{folder}", {}, device="cpu")
    is_text = torch.arange(SEQUENCE) < torch.tensor([[20], [15]])
    with torch.no_grad():
        whole = model(tokens, token_type_ids=segments).logits
        filled = model(tokens, token_type_ids=segments, attention_mask=is_text.long()).logits
        mine = run(stack, tokens + VOCABULARY * segments)
        for layer in stack.layers:
            for module in layer.modules():
                if hasattr(module, "documents"):
                    module.documents = (~is_text).long()
        mine_filled = run(stack, tokens + VOCABULARY * segments)
    assert torch.allclose(mine, whole, atol=ROUNDING, rtol=ROUNDING)
    assert torch.allclose(mine_filled, filled, atol=ROUNDING, rtol=ROUNDING)
    assert not torch.allclose(whole[1], filled[1], atol=1e-3)


def test_a_classifier_is_written_as_it_was_read(classifier: tuple[nn.Module, Path]) -> None:
    name = f"hf:{classifier[1]}"
    assert model_config(name).text_classes == 3
    assert class_names(name) == ("no", "yes", "both")
    written = tensors_of(build_layer_stack(name, {}, device="meta"), name)
    theirs = load_file(classifier[1] / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[tensor], value) for tensor, value in theirs.items())
    content = config_content(model_config(name))[1]
    assert content["architectures"] == ["BertForSequenceClassification"]
    assert content["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}


def test_new_classes_beside_trained_weights_have_a_new_head_alone(
    pretrained: tuple[nn.Module, Path],
) -> None:
    model, folder = pretrained
    stack = build_layer_stack(f"hf:{folder}", {"classes": 5}, device="cpu", seed=1)
    head = dict(stack.layers[-1].named_parameters())
    assert torch.equal(head["texts.pooler.weight"], model.bert.pooler.dense.weight)
    assert head["texts.classes.weight"].shape == (5, 32)
    config = apply_model_arguments(model_config(f"hf:{folder}"), {"classes": 5})
    layout = export_layout(config, {}, tokenizer=None, classes=tuple("abcde"))
    content = json.loads(layout.files["config.json"])
    assert content["architectures"] == ["BertForSequenceClassification"]
    assert content["id2label"]["4"] == "e"
    assert not any(tensor.startswith("cls.") for tensor in layout.base)


def test_another_number_of_classes_has_a_new_projection_beside_the_trained_pooler(
    classifier: tuple[nn.Module, Path],
) -> None:
    model, folder = classifier
    stack = build_layer_stack(f"hf:{folder}", {"classes": 4}, device="cpu", seed=1)
    head = dict(stack.layers[-1].named_parameters())
    assert torch.equal(head["texts.pooler.weight"], model.bert.pooler.dense.weight)
    assert head["texts.classes.weight"].shape == (4, 32)
