"""Adapters trained beside a Hugging Face model, as PEFT reads them, and merged."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import windlass
from windlass.data.tokenizer import byte_tokenizer
from windlass.errors import RequestError, StorageError

STEPS = (
    "train.batch=2", "train.sequence=16", "train.steps=3", "train.evaluate_sequences=0",
    "train.learning_rate=0.05", "train.warmup=0", "compile=false", "precision=float32",
)  # fmt: skip
SIZES = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
}  # fmt: skip
SIZES["tied"] = SIZES["llama"]
SIZES["mixtral"] = SIZES["llama"] | {"num_local_experts": 4}
SIZES["qwen3_moe"] = SIZES["llama"] | {
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def base(path: Path, model_type: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(3)
    is_tied = model_type == "tied"
    config = AutoConfig.for_model(
        "llama" if is_tied else model_type, vocab_size=260, **SIZES[model_type],
        **({"tie_word_embeddings": True} if is_tied else {}),
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save(path / "tokenizer.json")
    return path


def hashes(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def trained(home: Path, folder: Path, *overrides: str) -> Path:
    words = (*STEPS, f"data.source={home / 'text'}", "lora.rank=3", *overrides)
    run = windlass.train(f"hf:{folder}", *words, root=home / "runs")
    list(run)
    return run.folder


# peft asks transformers by a name that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("llama", ()),
        ("tied", ('lora.trained=["embedding.*"]',)),
        pytest.param("gpt2", ('lora.targets=["attention.*"]',), marks=pytest.mark.slow),
        pytest.param("mixtral", (), marks=pytest.mark.slow),
        pytest.param(
            "mixtral", ('lora.targets=["router", "input", "output"]',), marks=pytest.mark.slow
        ),
        pytest.param("qwen3_moe", ('lora.ranks={"down" = 2}',), marks=pytest.mark.slow),
    ],
)
def test_peft_computes_with_an_exported_adapter_what_the_merged_model_computes(
    home: Path, model_type: str, targets: tuple[str, ...]
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = base(home / "base", model_type)
    before = hashes(folder)
    run = trained(home, folder, *targets)

    windlass.export(run, to=f"peft:{home / 'adapter'}")
    windlass.export(run, to=f"hf:{home / 'merged'}")
    with pytest.raises(StorageError, match="is there already"):
        windlass.export(run, to=f"peft:{folder}")

    tokens = torch.arange(32)[None]
    plain, merged = (
        AutoModelForCausalLM.from_pretrained(each) for each in (folder, home / "merged")
    )
    with torch.no_grad():
        untrained = plain(tokens).logits
        expected = merged(tokens).logits
        adapted = PeftModel.from_pretrained(plain, home / "adapter")(tokens).logits
    # Two products in place of one round differently in float32.
    torch.testing.assert_close(adapted, expected, rtol=1e-5, atol=1e-5)
    assert (adapted - untrained).abs().max() > 1e-2
    assert hashes(folder) == before
    config = json.loads((home / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


def test_a_run_without_adapters_has_none_to_export(home: Path):
    folder = base(home / "base", "gpt2")
    words = (*STEPS, f"data.source={home / 'text'}", "train.steps=1")
    whole = windlass.train(f"hf:{folder}", *words, root=home / "runs")
    list(whole)
    with pytest.raises(RequestError, match=r"trained no adapter \(`lora.rank`\)"):
        windlass.export(whole.folder, to=f"peft:{home / 'adapter'}")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_embedding_that_peft_unties_is_refused_and_one_that_stays_tied_is_read(home: Path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from windlass.errors import ModelError

    folder = base(home / "base", "tied")
    for together in (False, True):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder),
            LoraConfig(
                r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"],
                ensure_weight_tying=together, task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(0.25)
        model.save_pretrained(home / f"adapter-{together}")
    run = windlass.train(
        f"hf:{folder}", *STEPS, f"data.source={home / 'text'}",
        f"lora.adapter={home / 'adapter-True'}", "train.learning_rate=1e-12", "train.steps=1",
        root=home / "runs",
    )  # fmt: skip
    list(run)
    windlass.export(run.folder, to=f"hf:{home / 'merged'}")

    tokens = torch.arange(32)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(home / "merged")(tokens).logits
        torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match=r"apart from `lm_head`, and the model ties them"):
        windlass.plan(f"hf:{folder}", *STEPS, f"lora.adapter={home / 'adapter-False'}")
