"""What a run's model writes is drawn, ended and shown as the folder it came from says."""

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import windlass
from windlass.errors import RequestError
from windlass.inference.text_samples import Drawing, open_dialogue

SPECIAL = ("<|begin|>", "<|end_of_text|>", "<|head|>", "<|/head|>", "<|eot|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>{{ m['content'] }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>{% endif %}"
)
CHAIN = ("<|/head|>", "y", "e", "s", "<|eot|>", "<|head|>", "u", "<|/head|>")
"""What the model says: `yes`, the end of its turn, and then a turn of its own."""


def chat_folder(path: Path, generation: Mapping[str, object], chain: tuple[str, ...]) -> str:
    """A Llama whose head looks up the next token of a chain, and which says two ends of text."""
    path.mkdir()
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    count, width = len(vocabulary), 264
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": count, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": [1, 4],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4], **generation}))
    special = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    head = torch.zeros(count, width)
    for before, after in pairwise(chain):
        head[vocabulary[after], vocabulary[before]] = 9.0
    shapes = {f"self_attn.{part}_proj": (width, width) for part in "qkvo"}
    shapes |= {"mlp.gate_proj": (8, width), "mlp.up_proj": (8, width), "mlp.down_proj": (width, 8)}
    block = "model.layers.0"
    weights = {f"{block}.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    norms = (f"{block}.input_layernorm", f"{block}.post_attention_layernorm", "model.norm")
    weights |= {f"{name}.weight": torch.ones(width) for name in norms}
    weights |= {"model.embed_tokens.weight": torch.eye(count, width), "lm_head.weight": head}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def imported(
    home: Path, chain: tuple[str, ...] = CHAIN, **generation: object
) -> tuple[Path, Path]:  # fmt: skip
    folder = Path(chat_folder(home / "model", generation, chain))
    return folder, windlass.import_model(folder, root=home / "runs")


def written(run: Path, prompt: str, **options: object) -> str:
    return "".join(windlass.sample(run, prompt, tokens=12, **options))  # type: ignore[arg-type]


def test_an_answer_ends_at_every_end_of_text_that_the_folder_names(home: Path):
    _, run = imported(home)

    assert written(run, "hi", chat=True, temperature=0.0) == "yes"
    assert written(run, "e", temperature=0.0) == "s"


@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.7},
        {"do_sample": False, "no_repeat_ngram_size": 2, "suppress_tokens": [70]},
    ],
)
def test_a_folder_that_says_how_it_writes_is_followed_as_by_transformers(
    home: Path, generation: dict[str, object]
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    circle = ("a", "b", "c", "a")
    folder, run = imported(home, circle, **generation)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("a", return_tensors="pt")

    theirs = model.generate(**prompt, max_new_tokens=12, pad_token_id=0)[0, 1:]

    assert written(run, "a") == tokenizer.decode(theirs, skip_special_tokens=True)


def test_what_the_folder_asks_for_and_is_not_computed_is_refused_by_name(home: Path):
    _, run = imported(home, num_beams=4)

    with pytest.raises(RequestError, match="asks for `num_beams` = 4, which is not computed here"):
        written(run, "hi")


def test_a_key_of_transformers_needs_its_extra(home: Path, monkeypatch: pytest.MonkeyPatch):
    _, run = imported(home, do_sample=True, min_p=0.5)
    monkeypatch.setitem(sys.modules, "transformers.generation.logits_process", None)

    with pytest.raises(
        RequestError, match=r"`min_p` .* computed by transformers; install .*\[hf\]"
    ):
        written(run, "hi")


def test_a_dialogue_repeats_what_was_said_before(home: Path):
    folder, run = imported(home)
    chats: list[list[int]] = []

    with open_dialogue(run, Drawing(tokens=8, temperature=0.0), system="Be brief.") as dialogue:
        generate = type(dialogue._language).generate
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                type(dialogue._language), "generate",
                lambda model, ids, *a, **k: (chats.append(ids), generate(model, ids, *a, **k))[1],
            )  # fmt: skip
            answers = ["".join(dialogue.say(text)) for text in ("a", "b")]
            with pytest.raises(RequestError, match="tokens, and the model reads 64; begin another"):
                "".join(dialogue.say("long" * 20))
            dialogue.begin()
            "".join(dialogue.say("a"))

    from transformers import AutoTokenizer

    turns = [{"role": "system", "content": "Be brief."}]
    turns += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    turns += [{"role": "user", "content": "b"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert answers == ["yes", "yes"]
    assert chats[1] == tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    assert chats[2] == chats[0]
