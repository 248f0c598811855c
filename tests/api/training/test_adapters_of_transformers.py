"""Adapters beside a model that runs by the code of transformers, as PEFT reads and writes them."""

import json
from pathlib import Path

import pytest
import torch

import windlass
from tiny_transformers import tiny_folder
from windlass.errors import WindlassError

# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TOKENS = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(1))


def logits(folder: Path, adapters: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if adapters is not None:
        model = PeftModel.from_pretrained(model, adapters).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def saved_adapter(folder: Path, path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    words = LoraConfig(
        r=3, lora_alpha=5, target_modules=r".*\.(q_proj|down_proj)", rank_pattern={"q_proj": 2},
        use_rslora=True, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), words)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    model.save_pretrained(path)


def test_an_adapter_of_peft_goes_on_and_what_is_written_loads_in_peft(home: Path):
    name, _ = tiny_folder("olmo2", home / "base")
    saved_adapter(home / "base", home / "theirs")
    data = [(row[:-1], row[1:]) for row in torch.randint(3, 256, (5, 13))]

    run = windlass.train(
        name, f"lora.adapter={home / 'theirs'}", "train.steps=1", "train.batch=4",
        "train.learning_rate=0.1", "compile=false", "precision=float32", "data.held_out=0.2",
        data=data, root=home / "runs",
    )  # fmt: skip
    list(run)
    windlass.export(run.folder, to=f"peft:{home / 'ours'}", root=home / "runs")
    windlass.export(run.folder, to=f"hf:{home / 'merged'}", root=home / "runs")

    trained, theirs = logits(home / "base", home / "ours"), logits(home / "base", home / "theirs")
    torch.testing.assert_close(trained, logits(home / "merged"), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(trained, theirs, atol=1e-3)


def test_an_adapter_of_weights_by_magnitude_is_refused_by_name(home: Path):
    name, _ = tiny_folder("olmo2", home / "base")
    saved_adapter(home / "base", home / "theirs")
    file = home / "theirs" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_dora": True}))

    with pytest.raises(WindlassError, match="has `use_dora`"):
        windlass.plan(name, f"lora.adapter={home / 'theirs'}")
