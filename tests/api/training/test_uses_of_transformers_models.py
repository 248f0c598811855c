"""What is done with a model that runs by the code of transformers, beside training all of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import windlass
from hub_folders import chat_model_folder
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import materialize_layer
from windlass.schema import LoraRequest

pytestmark = pytest.mark.slow
STEPS, RATE = 4, 3e-3
WORDS = (
    f"train.steps={STEPS}", "train.save_every=2", "train.batch=4", "train.evaluate_sequences=1",
    "data.held_out=0.2", "compile=false", "precision=float32", "train.optimizer=adamw",
    "train.clip=inf", f"train.learning_rate={RATE}", "train.schedule=constant", "train.warmup=0",
    "train.weight_decay=0", "train.betas=[0.9,0.95]", "train.epsilon=1e-8",
)  # fmt: skip


@pytest.fixture
def folder(home: Path) -> Path:
    """An OLMo 2, of which no table of ours knows."""
    return chat_model_folder(home / "model", "olmo2")


def plain_model(folder: Path) -> Any:  # noqa: ANN401  of transformers
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(4, 260, (5, 25))
    return tokens[:, :-1], tokens[:, 1:]


def losses(home: Path, folder: Path, *words: str) -> list[float]:
    run = windlass.train(
        f"hf:{folder}", *WORDS, *words, data=list(zip(*rows(), strict=True)), root=home / "runs"
    )
    return [step.loss for step in run]


def plain_losses(model: Any) -> list[float]:  # noqa: ANN401  of transformers
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    inputs, targets = (part[:4] for part in rows())
    found = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_an_interrupted_run_goes_on_to_the_same_bits(home: Path, folder: Path):
    words = (*WORDS, f"data.source={home / 'text'}", "train.sequence=32")
    whole = [step.loss for step in windlass.train(f"hf:{folder}", *words, root=home / "runs")]
    run = windlass.train(f"hf:{folder}", *words, root=home / "runs")
    next(steps := iter(run))
    next(steps)
    next(steps)
    del steps

    resumed = [step.loss for step in windlass.resume(run.folder, root=home / "runs")]

    assert resumed == whole[2:]


def test_frozen_weights_stay_as_in_a_plain_loop(home: Path, folder: Path):
    model = plain_model(folder)
    for name, weight in model.named_parameters():
        weight.requires_grad = "mlp" not in name and "embed" not in name

    ours = losses(home, folder, 'train.frozen=["*mlp*","*embed*"]')

    assert ours == pytest.approx(plain_losses(model), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_learn_as_those_of_peft(home: Path, folder: Path):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")
    model = get_peft_model(plain_model(folder), settings)
    request = LoraRequest(rank=2, alpha=4)
    stack = build_layer_stack(f"hf:{folder}", {}, device="meta", lora=request)
    drawn = {
        f"{name}.{path}": weight
        for index, name in enumerate(stack.names)
        for path, weight in materialize_layer(stack, index, seed=0, device="cpu").named_parameters()
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                own = name.removeprefix("base_model.model.").replace("lora_A.default.weight", "")
                weight.copy_(drawn[f"{own}lora_a"])

    ours = losses(home, folder, "lora.rank=2", "lora.alpha=4", "train.seed=0")

    assert ours == pytest.approx(plain_losses(model), rel=1e-5)


def test_answers_of_chats_are_learned_under_the_folders_template(home: Path, folder: Path):
    from transformers import AutoTokenizer

    chats = [
        [{"role": "user", "content": f"{n} times 2?"}, {"role": "assistant", "content": f"{2 * n}"}]
        for n in range(10, 15)
    ]
    source = home / "chats.jsonl"
    source.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), plain_model(folder)
    losses = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        prompt = tokenizer.apply_chat_template(
            chat[:1], add_generation_prompt=True, return_dict=False
        )
        logits = model(torch.tensor([ids[:-1]])).logits[0, len(prompt) - 1 :]
        losses.append(functional.cross_entropy(logits, torch.tensor(ids[len(prompt) :])).item())

    run = windlass.train(
        f"hf:{folder}", *WORDS, "train.sequence=64", "data.format=chat", f"data.source={source}",
        root=home / "runs",
    )  # fmt: skip
    first = next(iter(run)).loss

    # All answers are equally long, and one chat of the five is held out.
    means = [(sum(losses) - each) / 4 for each in losses]
    assert any(first == pytest.approx(mean, rel=1e-5) for mean in means)


def test_what_is_written_is_what_transformers_generates(home: Path, folder: Path):
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), plain_model(folder).eval()
    prompt = tokenizer("three", return_tensors="pt")
    theirs = model.generate(
        prompt.input_ids, attention_mask=prompt.attention_mask, max_new_tokens=24, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    run = windlass.import_model(folder, root=home / "runs")

    ours = "".join(windlass.sample(run, "three", tokens=24, temperature=0.0))

    written = theirs[0, prompt.input_ids.shape[1] :]
    assert ours == tokenizer.decode(written, skip_special_tokens=True)


def test_two_replicas_learn_as_a_plain_loop_does(home: Path, folder: Path):
    ours = losses(home, folder, "parallel.data=2")

    assert ours == pytest.approx(plain_losses(plain_model(folder)), rel=1e-5)
