"""Runs written as folders of Hugging Face, and read by `transformers`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import windlass
from command_line import TINY
from windlass.errors import CheckpointError, RequestError, StorageError
from windlass.jobs.objects import NO_OBJECTS

MODEL, *OVERRIDES = TINY
OTHERS = (
    "gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "bert-tiny", "llama3.2-1b", "qwen2.5-0.5b",
    "qwen3-0.6b", "mistral-7b-v0.1", "gemma2-2b", "gemma3-1b", "modernbert-base",
)  # fmt: skip


def trained(home: Path, model: str, *overrides: str) -> Path:
    words = (*OVERRIDES, f"data.source={home / 'text'}", "train.steps=2", *overrides)
    run = windlass.train(model, *words, root=home / "runs")
    list(run)
    return run.folder


@pytest.mark.parametrize(
    "model",
    [
        "llama-tiny",
        *(pytest.param(model, marks=pytest.mark.slow) for model in OTHERS),
    ],
)
def test_a_run_of_the_catalog_is_loaded_by_transformers(home: Path, model: str):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    words = ("model.vocabulary=258", "model.width=64", "model.sequence=48", "model.kv_heads=2")
    run = trained(home, model, *words)

    exported = windlass.export(run, to=f"hf:{home / 'out'}")

    auto = AutoModelForMaskedLM if "bert" in model else AutoModelForCausalLM
    theirs, report = auto.from_pretrained(exported.weights, output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected, mine = theirs(tokens).logits, logits_of(run, home / "weights", tokens)

    # The same products in float32, in another order.
    assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-5)


def logits_of(run: Path, file: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What the weights of a run compute, by its other export."""
    windlass.export(run, to=file)
    weights = load_file(file)
    request = windlass.load(run).request
    assert request is not None
    stack = NO_OBJECTS.stack(request.model_identity, seed=None)
    for tied, owner in stack.tied_weights.items():
        weights[tied] = weights[owner]
    x = tokens
    for name, layer in zip(stack.names, stack.layers, strict=True):
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items()}
        layer.load_state_dict({key: own[key] for key in layer.state_dict()}, assign=True)
        x = layer.eval()(x)
    return x


def test_a_model_of_ones_own_is_no_folder_of_hugging_face(home: Path):
    file = home / "model.py"
    file.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 8), nn.Linear(8, 257))\n"
    )
    words = ("data.tokenizer=byte", "train.steps=1", "train.batch=2", "train.sequence=16")
    run = windlass.train(
        f"{file}:build", *words, f"data.source={home / 'text'}", "compile=false", root=home / "runs"
    )
    list(run)

    with pytest.raises(RequestError, match="is a model of your own"):
        windlass.export(run.folder, to="hf")


def test_a_place_or_a_format_that_does_not_serve_is_refused(home: Path):
    run = trained(home, MODEL)
    with pytest.raises(RequestError, match=r"no format `hff`; did you mean `hf`\?"):
        windlass.export(run, to="hff:out")

    (home / "out").mkdir()
    (home / "out" / "mine.txt").write_text("mine")

    with pytest.raises(StorageError, match="is there already; name another folder"):
        windlass.export(run, to=f"hf:{home / 'out'}")

    assert [path.name for path in (home / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny"])
def test_a_gguf_file_is_loaded_by_transformers(home: Path, model: str):
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    # Of a GPT-2, `transformers` takes no other length from such a file.
    sizes = ("model.vocabulary=258", "model.width=64", "model.sequence=1024", "model.kv_heads=2")
    run = trained(home, model, *sizes)
    windlass.export(run, to=f"gguf:{home / 'out.gguf'}")

    theirs = AutoModelForCausalLM.from_pretrained(home, gguf_file="out.gguf")
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected, mine = theirs(tokens).logits, logits_of(run, home / "weights", tokens)
    # The same products in float32, in another order.
    assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-5)
    reader = GGUFReader(home / "out.gguf")
    names = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(names) == 258
    assert names[256] == "<|endoftext|>"
    assert reader.fields["tokenizer.ggml.merges"].contents()  # no reader loads it without
    assert reader.fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert not list(home.glob(".out.gguf*"))


def test_transformers_generates_the_text_that_a_run_writes(home: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sizes = ("model.vocabulary=258", "model.width=64", "model.sequence=48")
    run = trained(home, "gpt-tiny", *sizes, "train.steps=20")
    ours = "".join(windlass.sample(run, "three", tokens=24, temperature=0.0))

    folder = windlass.export(run, to=f"hf:{home / 'out'}").weights
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("three", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)

    assert len(ours) > 8
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256  # ends with it
    assert tokenizer.decode(theirs[0], skip_special_tokens=True) == f"three{ours}"


@pytest.mark.parametrize(
    "model_type",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mistral"))],
)
def test_a_gguf_file_of_a_folder_computes_what_the_folder_did(home: Path, model_type: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, num_hidden_layers=2, hidden_size=32, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, vocab_size=64,
        max_position_embeddings=40, sliding_window=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(home / "model")
    run = windlass.import_model(home / "model", root=home / "runs")
    windlass.export(run, to=f"gguf:{home / 'out.gguf'}")

    again = AutoModelForCausalLM.from_pretrained(home, gguf_file="out.gguf")

    tokens = torch.arange(32)[None]
    with torch.no_grad():
        # The same products in float32, in another order.
        assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    ["train.ema=0.5", pytest.param("train.optimizer=schedule-free", marks=pytest.mark.slow)],
)
def test_an_export_has_the_weights_that_its_run_evaluated(home: Path, changes: str):
    run, file = trained(home, MODEL, changes, "precision=float32"), home / "averages.safetensors"
    windlass.export(run, to=file, ema="ema" in changes)
    averages, (checkpoint,) = load_file(file), sorted((run / "checkpoints").glob("step-*2"))
    state = {
        key: value for each in checkpoint.glob("layer-*") for key, value in load_file(each).items()
    }
    for name, average in averages.items():
        if "ema" in changes:
            expected = state[f"average/{name}"]
        else:
            expected = state[f"weight/{name}"].lerp(state[f"moment1/{name}"], 1 - 1 / 0.9)
        assert torch.equal(average, expected)
    if "ema" not in changes:
        with pytest.raises(CheckpointError, match="leave `--ema` out"):
            windlass.export(run, to=file, ema=True)
