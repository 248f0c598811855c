"""Adapters that training begins with: of a PEFT folder, and new ones beside a run of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import windlass
from api.training.test_adapter_files import STEPS, base, hashes
from command_line import TINY
from windlass.errors import ModelError, RequestError, WindlassError
from windlass.jobs.fine_tuning import base_of_adapters
from windlass.jobs.planned import make_request
from windlass.models.adapter_files.peft_adapter import PeftAdapter, linear_layers, peft_adapter
from windlass.models.adapter_files.peft_model import peft_config
from windlass.models.build import build_layer_stack
from windlass.models.catalog import model_config
from windlass.models.layer_stack import LayerStack
from windlass.schema.model_request import LoraRequest
from windlass.training.parent import find_parent

MODEL, *OVERRIDES = TINY
TOKENS = torch.arange(32)[None]
ROUNDING = 1e-5
"""Two products in place of one round differently in float32."""

# peft asks transformers by a name that transformers is about to drop.
# And it looks for the patterns of parameters among modules.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


def adapter(path: Path, folder: Path, **settings: object) -> torch.Tensor:
    """Saves an adapter of peft beside a base, and gives the logits of both together."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    words = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**words | settings)
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
        model.save_pretrained(path)
        return model.eval()(TOKENS).logits


def logits(folder: Path, adapters: Path | None = None) -> torch.Tensor:
    """What transformers computes with a folder, or peft with adapters beside it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return (model if adapters is None else PeftModel.from_pretrained(model, adapters))(
            TOKENS
        ).logits


QUERIES = {
    "target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"down_proj": 6},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 9}, "lora_dropout": 0.25,
}  # fmt: skip
"""An adapter beside parts of our fused layers, in two ranks and two scales."""


def test_adapters_of_peft_compute_what_peft_computes_and_are_written_as_they_were(home: Path):
    folder = base(home / "base", "llama")
    expected = adapter(home / "adapter", folder, target_modules=["q_proj", "v_proj", "o_proj"])
    request = make_request(f"hf:{folder}", f"lora.adapter={home / 'adapter'}")
    assert request.lora is not None

    stack = build_layer_stack(f"hf:{folder}", {}, device="cpu", lora=request.lora)
    x = TOKENS
    with torch.no_grad():
        for layer in stack.layers:
            x = layer(x)

    torch.testing.assert_close(x, expected, rtol=ROUNDING, atol=ROUNDING)
    assert (logits(folder) - expected).abs().max() > 100 * ROUNDING
    writer = peft_adapter(model_config(f"hf:{folder}"), stack, request.lora)
    written = written_tensors(stack, writer)
    before = load_file(home / "adapter" / "adapter_model.safetensors")
    assert before.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in before.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", ["llama", pytest.param("tied", marks=pytest.mark.slow)])
def test_an_adapter_beside_the_head_is_read_with_the_copies_that_peft_saves_beside_it(
    home: Path, model_type: str
):
    folder = base(home / "base", model_type)
    expected = adapter(home / "adapter", folder, target_modules=["q_proj", "lm_head"])
    request = make_request(f"hf:{folder}", f"lora.adapter={home / 'adapter'}")
    stack = build_layer_stack(f"hf:{folder}", {}, device="cpu", lora=request.lora)
    x = TOKENS
    with torch.no_grad():
        for layer in stack.layers:
            x = layer(x)

    torch.testing.assert_close(x, expected, rtol=ROUNDING, atol=ROUNDING)
    assert request.lora is not None
    assert request.lora.trained is None
    file = home / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    (copy,) = [name for name in tensors if name.endswith("head.base_layer.weight")]
    save_file(tensors | {copy: tensors[copy] + 1}, file)
    with pytest.raises(ModelError, match="of its own that is none of its `modules_to_save`"):
        build_layer_stack(f"hf:{folder}", {}, device="cpu", lora=request.lora)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_of_embeddings_and_of_a_resized_base_are_refused_by_name(home: Path):
    folder = base(home / "base", "llama")
    adapter(home / "adapter", folder, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ModelError, match="an adapter of PEFT's kind `Embedding`, and only those"):
        make_request(f"hf:{folder}", f"lora.adapter={home / 'adapter'}")

    adapter(home / "wide", folder, target_modules=["q_proj", "lm_head"])
    file = home / "wide" / "adapter_model.safetensors"
    tensors = load_file(file)
    (name,) = [each for each in tensors if each.endswith("head.base_layer.weight")]
    save_file(tensors | {name: torch.zeros(264, 32)}, file)
    with pytest.raises(ModelError, match=r"264, 32\] where \[260, 32\] fits; save the base as"):
        make_request(f"hf:{folder}", f"lora.adapter={home / 'wide'}")


PAIRS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "both parameters": ("qwen3_moe", {"target_parameters": PAIRS}),
    "one rank each": (
        "mixtral",
        {
            "target_parameters": PAIRS, "rank_pattern": {r".*\.gate_up_proj": 6},
            "alpha_pattern": {r".*\.gate_up_proj": 4},
        },
    ),
    "gate and up alone": ("mixtral", {"target_parameters": PAIRS[:1]}),
    "down alone": ("qwen3_moe", {"target_parameters": PAIRS[1:]}),
    "names of transformers 4": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "a router": ("mixtral", {"target_parameters": ["mlp.gate.weight"]}),
    "a router and experts": ("qwen3_moe", {"target_parameters": [*PAIRS, "mlp.gate.weight"]}),
}  # fmt: skip
"""Adapters beside experts, as peft stacks them beside transformers 5."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in list(EXPERTS)[1:]))
             for kind in EXPERTS],
)  # fmt: skip
def test_adapters_of_experts_compute_what_peft_computes_read_and_written(home: Path, kind: str):
    model_type, settings = EXPERTS[kind]
    folder = base(home / "base", model_type)
    expected = adapter(home / "adapter", folder, **{"target_modules": ["q_proj"], **settings})
    request = make_request(f"hf:{folder}", f"lora.adapter={home / 'adapter'}")
    stack = build_layer_stack(f"hf:{folder}", {}, device="cpu", lora=request.lora)
    x = TOKENS
    with torch.no_grad():
        for layer in stack.layers:
            x = layer(x)
    torch.testing.assert_close(x, expected, rtol=ROUNDING, atol=ROUNDING)
    assert (logits(folder) - expected).abs().max() > 100 * ROUNDING

    assert request.lora is not None
    if kind == "gate and up alone":
        with pytest.raises(ModelError, match="beside `gate` and `up`, and PEFT reads those of all"):
            save_adapters(home / "again", folder, stack, request.lora)
        return
    save_adapters(home / "again", folder, stack, request.lora)

    torch.testing.assert_close(
        logits(folder, home / "again"), expected, rtol=ROUNDING, atol=ROUNDING
    )


def save_adapters(path: Path, folder: Path, stack: LayerStack, lora: LoraRequest) -> None:
    """Writes the adapters of a stack for peft."""
    writer = peft_adapter(model_config(f"hf:{folder}"), stack, lora)
    tensors = written_tensors(stack, writer)
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(writer.content(tensors)))
    save_file(tensors, path / "adapter_model.safetensors")


def written_tensors(stack: LayerStack, writer: PeftAdapter) -> dict[str, torch.Tensor]:
    layers = nn.ModuleDict(dict(zip(stack.names, stack.layers, strict=True)))
    return {
        name: tensor
        for linear in linear_layers(stack, adapted=True)
        for module in (layers.get_submodule(linear),)
        for name, tensor in writer.tensors(linear, module.lora_a.data, module.lora_b.data)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", QUERIES),
        ("llama", {"use_rslora": True}),
        ("gpt2", {"fan_in_fan_out": True}),
        ("gptj", {}),
    ],
)
def test_an_imported_run_of_adapters_is_merged_and_exported_as_peft_computes(
    home: Path, model_type: str, settings: dict[str, Any]
):
    folder = base(home / "base", model_type)
    expected = adapter(home / "adapter", folder, **settings)

    run = windlass.import_model(home / "adapter", root=home / "runs")
    windlass.export(run, to=f"hf:{home / 'merged'}")
    windlass.export(run, to=f"peft:{home / 'again'}")

    again = logits(folder, home / "again")
    torch.testing.assert_close(logits(home / "merged"), expected, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(again, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_a_run_that_begins_with_adapters_of_peft_trains_them_and_peft_loads_them(home: Path):
    folder = base(home / "base", "llama")
    adapter(home / "adapter", folder, **QUERIES)
    files = hashes(folder) | hashes(home / "adapter")
    words = (*STEPS, f"data.source={home / 'text'}", f"lora.adapter={home / 'adapter'}")

    run = windlass.train(base_of_adapters(home / "adapter"), *words, root=home / "runs")
    list(run)
    windlass.export(run.folder, to=f"peft:{home / 'trained'}")
    windlass.export(run.folder, to=f"hf:{home / 'merged'}")

    merged = logits(home / "merged")
    torch.testing.assert_close(
        logits(folder, home / "trained"), merged, rtol=ROUNDING, atol=ROUNDING
    )
    assert (merged - logits(folder, home / "adapter")).abs().max() > 100 * ROUNDING
    assert hashes(folder) | hashes(home / "adapter") == files
    config = json.loads((home / "trained" / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (6, {})
    assert config["lora_dropout"] == 0.25


def written(path: Path, **changes: object) -> Path:
    """A small adapter of Llama, as peft writes it, with changes of its configuration."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "not/here"}
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(2, 64), f"{module}.lora_B.weight": torch.ones(64, 2),
    }  # fmt: skip
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_adapters_of_another_base_are_one_clear_error(home: Path):
    folder = written(home / "adapter")
    with pytest.raises(ModelError, match=r"`not/here`, which is no folder here; name the base"):
        base_of_adapters(folder)
    words = ("model.layers=2", "model.width=36", f"lora.adapter={folder}")
    with pytest.raises(
        ModelError, match=r"beside `not/here` do not fit `llama-tiny`.*\[2, 64\]\) from.*\[2, 36\]"
    ):
        windlass.plan("llama-tiny", *words)
    with pytest.raises(RequestError, match=r"`lora\.rank` with `lora\.adapter`, whose folder says"):
        windlass.plan("llama-tiny", "lora.rank=2", *words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is read"),
        ({"use_dora": True}, "`use_dora`"),
        ({"use_bdlora": {"nblocks": 2}}, "`use_bdlora`"),
        ({"key_to_come": 3}, "`key_to_come`"),
        ({"bias": "all"}, "biases are not trained"),
        ({"init_lora_weights": "pissa"}, "changes the weights of the base"),
        ({"lora_alpha": None}, "no number above 0"),
    ],
)
def test_an_adapter_that_is_more_than_two_factors_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(WindlassError, match=message):
        base_of_adapters(written(tmp_path / "adapter", **changes))


def test_every_key_that_peft_itself_writes_for_a_plain_adapter_is_read(tmp_path: Path):
    from peft import LoraConfig

    plain = {k: v for k, v in LoraConfig().to_dict().items() if v is not None}
    folder = written(
        tmp_path / "adapter", **{**plain, "lora_alpha": 4, "target_modules": ["q_proj"]}
    )

    assert peft_config(folder).lora_alpha == 4


def test_adapters_beside_a_run_of_ours_leave_its_weights_as_they_are(home: Path):
    words = (*OVERRIDES, f"data.source={home / 'text'}", "train.steps=2", "train.save_every=2")
    parent = windlass.train(MODEL, *words, root=home / "runs")
    list(parent)
    asked = ("lora.rank=2", "lora.dropout=0.1", "train.learning_rate=0.05")
    child = windlass.train(None, *asked, parent=parent.folder, root=home / "runs")
    list(child)
    assert "adapters beside the weights of step 2" in child.notes[-1]

    continued = find_parent(parent.folder, continues=True)
    with pytest.raises(RequestError, match=r"trained all weights; leave `--continue` out"):
        windlass.train(None, *asked, "train.steps=4", parent=continued, root=home / "runs")

    windlass.export(parent.folder, to=home / "parent.safetensors")
    windlass.export(child.folder, to=home / "child.safetensors")
    before, after = (load_file(home / f"{name}.safetensors") for name in ("parent", "child"))
    changes = {name: after[name] - tensor for name, tensor in before.items()}
    changed = {name for name, change in changes.items() if change.any()}
    assert changed
    assert all(name.endswith((".input.weight", ".output.weight")) for name in changed)
    assert all(torch.linalg.matrix_rank(changes[name]) <= 2 for name in changed)


def test_targets_as_peft_takes_them_are_those_of_our_layers(home: Path):
    folder = base(home / "base", "llama")

    def targets(*names: str) -> tuple[str, ...] | None:
        words = f"lora.targets={json.dumps(names)}"
        lora = windlass.plan(f"hf:{folder}", *STEPS, words).request.lora
        assert lora is not None
        return lora.targets

    assert targets("all-linear") is None
    assert targets("q_proj", "k_proj", "v_proj") == targets(r".*\.self_attn\.[qkv]_proj")
    assert targets("lm_head") is not None
    assert all(each.endswith("attention.output") for each in targets("o_proj") or ("none",))
    with pytest.raises(ModelError, match=r"chooses `model\.layers\.0\.self_attn\.q_proj` without"):
        targets("q_proj")
    with pytest.raises(ModelError, match=r"has no linear layer of that name; PEFT knows down_proj"):
        targets("qproj")
