"""Our transformers compute what the reference implementations compute."""

import pytest
import torch
from torch import Tensor, nn

from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack

SMALL = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "sequence": 24}


def logits(stack: LayerStack, tokens: Tensor) -> Tensor:
    x = tokens
    for layer in stack.layers:
        x = layer(x)
    return x


def load(stack: LayerStack, theirs: dict[str, Tensor]) -> None:
    for name, layer in zip(stack.names, stack.layers, strict=True):
        layer.load_state_dict(
            {path: theirs[f"{name}.{path}"] for path in layer.state_dict()}, strict=True
        )


def test_a_bert_block_equals_torchs_encoder_layer():
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    state, mine = theirs.state_dict(), build_layer_stack("bert-base", SMALL, device="cpu", seed=0)
    named = {
        "attention.input.weight": state["self_attn.in_proj_weight"],
        "attention.input.bias": state["self_attn.in_proj_bias"],
    }
    parts = {
        "attention.output": "self_attn.out_proj", "attention_norm": "norm1",
        "hidden.input": "linear1", "hidden.output": "linear2", "hidden_norm": "norm2",
    }  # fmt: skip
    for part, other in parts.items():
        for leaf in ("weight", "bias"):
            named[f"{part}.{leaf}"] = state[f"{other}.{leaf}"]
    block = mine.layers[1]
    block.load_state_dict(named, strict=True)
    x = torch.randn(2, 12, 32)

    assert torch.allclose(block(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_a_split_bert_block_equals_the_block():
    block, split = (
        build_layer_stack("bert-base", {**SMALL, "split_blocks": halves}, device="cpu", seed=0)
        for halves in (0, 1)
    )
    attention, hidden = split.layers[1:3]
    state = block.layers[1].state_dict()
    for half, branch in ((attention, "attention"), (hidden, "hidden")):
        own = {
            name.replace(f"{branch}_norm", "norm").replace(f"{branch}.", "branch."): value
            for name, value in state.items()
            if name.startswith(branch)
        }
        half.load_state_dict(own, strict=True)
    x = torch.randn(2, 12, 32)

    assert torch.equal(hidden(attention(x)), block.layers[1](x))


@pytest.mark.parametrize(("name", "sees"), [("bert-base", True), ("gpt2-124m", False)])
def test_only_an_encoder_attends_to_later_tokens(name: str, sees: bool):
    stack = build_layer_stack(name, SMALL, device="cpu", seed=0)
    tokens = torch.randint(0, 50, (1, 12))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 50
    first, other = (logits(stack, each)[0, 0] for each in (tokens, changed))
    assert torch.equal(first, other) != sees


@pytest.mark.filterwarnings("ignore")
def test_gpt2_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = theirs.state_dict()
    named = {
        "embedding.tokens.weight": state["transformer.wte.weight"],
        "embedding.positions.weight": state["transformer.wpe.weight"],
        "head.projection.weight": state["lm_head.weight"],
    }
    parts = {
        "attention_norm": "ln_1", "hidden_norm": "ln_2",
        "attention.input": "attn.c_attn", "attention.output": "attn.c_proj",
        "hidden.input": "mlp.c_fc", "hidden.output": "mlp.c_proj",
    }  # fmt: skip
    for leaf in ("weight", "bias"):
        named[f"head.norm.{leaf}"] = state[f"transformer.ln_f.{leaf}"]
        for index in range(2):
            for mine, other in parts.items():
                value = state[f"transformer.h.{index}.{other}.{leaf}"]
                named[f"block{index}.{mine}.{leaf}"] = value.T if "." in mine else value
    stack = build_layer_stack("gpt2-124m", SMALL, device="cpu", seed=0)
    load(stack, named)
    tokens = torch.randint(0, 50, (2, 24))

    assert torch.allclose(logits(stack, tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_llama_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = theirs.state_dict()
    named = {
        "embedding.tokens.weight": state["model.embed_tokens.weight"],
        "head.norm.weight": state["model.norm.weight"],
        "head.projection.weight": state["lm_head.weight"],
    }
    parts = {
        "attention_norm": "input_layernorm", "hidden_norm": "post_attention_layernorm",
        "attention.output": "self_attn.o_proj", "hidden.gate": "mlp.gate_proj",
        "hidden.input": "mlp.up_proj", "hidden.output": "mlp.down_proj",
    }  # fmt: skip
    for index in range(2):
        prefix = f"model.layers.{index}"
        for mine, other in parts.items():
            named[f"block{index}.{mine}.weight"] = state[f"{prefix}.{other}.weight"]
        named[f"block{index}.attention.input.weight"] = torch.cat(
            [state[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
        )
    stack = build_layer_stack(
        "llama2-7b", {**SMALL, "kv_heads": 2, "ffn": 48}, device="cpu", seed=0
    )
    load(stack, named)
    tokens = torch.randint(0, 50, (2, 24))

    assert torch.allclose(logits(stack, tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_gpt_neox_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=50, hidden_size=32, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, rotary_pct=0.25, max_position_embeddings=24,
    )  # fmt: skip
    theirs = transformers.GPTNeoXForCausalLM(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = theirs.state_dict()
    named = {
        "embedding.tokens.weight": state["gpt_neox.embed_in.weight"],
        "head.projection.weight": theirs.get_output_embeddings().weight,
    }
    parts = {
        "attention_norm": "input_layernorm", "hidden_norm": "post_attention_layernorm",
        "attention.output": "attention.dense", "hidden.input": "mlp.dense_h_to_4h",
        "hidden.output": "mlp.dense_4h_to_h",
    }  # fmt: skip
    for leaf in ("weight", "bias"):
        named[f"head.norm.{leaf}"] = state[f"gpt_neox.final_layer_norm.{leaf}"]
        for index in range(2):
            prefix = f"gpt_neox.layers.{index}"
            for mine, other in parts.items():
                named[f"block{index}.{mine}.{leaf}"] = state[f"{prefix}.{other}.{leaf}"]
            # Theirs keeps query, key and value of one head together.
            mixed = state[f"{prefix}.attention.query_key_value.{leaf}"]
            parted = mixed.unflatten(0, (2, 3, 16)).transpose(0, 1).flatten(0, 2)
            named[f"block{index}.attention.input.{leaf}"] = parted
    arguments = {**SMALL, "heads": 2}
    stack = build_layer_stack("gpt-neox-20b", arguments, device="cpu", seed=0)
    load(stack, named)
    tokens = torch.randint(0, 50, (2, 24))

    assert torch.allclose(logits(stack, tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
