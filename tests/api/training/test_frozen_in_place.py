"""Adapters beside a streamed base, whose files are read where they stand or kept once."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import windlass
from hub_folders import gpt2_folder
from windlass.data.tokenizer import byte_tokenizer
from windlass.errors import CheckpointError
from windlass.schema import CHECKPOINT_FOLDER

WIDTH, HIDDEN, VOCABULARY = 32, 64, 260
WORDS = (
    "lora.rank=2", "train.steps=4", "train.save_every=2", "train.batch=2", "train.sequence=32",
    "train.evaluate_sequences=2", "train.learning_rate=0.01", "compile=false", "precision=float32",
)  # fmt: skip


def llama_folder(path: Path, *, experts: int = 0) -> Path:
    """A tiny Llama in bfloat16, in two files, with its tokenizer; with experts a Mixtral."""
    path.mkdir()
    sizes = {
        "num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": HIDDEN, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    kind = {"model_type": "llama"}
    if experts:
        kind = {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": 2}
    (path / "config.json").write_text(json.dumps({**kind, **sizes}))
    byte_tokenizer().save(path / "tokenizer.json")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=generator)).bfloat16()

    first = {"model.embed_tokens.weight": normal(VOCABULARY, WIDTH)}
    second = {"model.norm.weight": 1 + normal(WIDTH), "lm_head.weight": normal(VOCABULARY, WIDTH)}
    for block, tensors in enumerate((first, second)):
        shapes = {
            "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
            "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
            **(feed_forward_shapes() if not experts else expert_shapes(experts)),
        }  # fmt: skip
        for name, shape in shapes.items():
            tensors[f"model.layers.{block}.{name}.weight"] = normal(*shape) + (len(shape) == 1)
    places: dict[str, str] = {}
    for number, tensors in enumerate((first, second), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, path / name)
        places |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def feed_forward_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
    }  # fmt: skip


def expert_shapes(experts: int) -> dict[str, tuple[int, ...]]:
    mixture = "block_sparse_moe"
    return {f"{mixture}.gate": (experts, WIDTH)} | {
        f"{mixture}.experts.{number}.{name}": shape
        for number in range(experts)
        for name, shape in (
            ("w1", (HIDDEN, WIDTH)), ("w3", (HIDDEN, WIDTH)), ("w2", (WIDTH, HIDDEN))
        )
    }  # fmt: skip


def train(home: Path, model: str, *overrides: str) -> windlass.Run:
    words = (f"data.source={home / 'text'}", *WORDS, *overrides)
    return windlass.train(model, *words, root=home / "runs")


def stop_after_three(run: windlass.Run) -> float:
    """Leaves a run whose newest checkpoint is that of its second step; gives the third's loss."""
    steps = iter(run)
    loss = next(step.loss for step in steps if step.step == 3)
    del steps
    return loss


def finish(run: windlass.Run, home: Path) -> list[float]:
    """Losses of a run that goes on from its newest checkpoint to its end."""
    list(windlass.resume(run.folder, root=home / "runs"))
    return [step.loss for step in windlass.load(run.folder).steps]


def checkpoints(run: windlass.Run) -> list[Path]:
    return sorted((run.folder / CHECKPOINT_FOLDER).glob("step-*"))


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of each file."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


def test_a_streamed_base_is_read_where_it_stands_and_gives_the_bits_of_one_in_memory(
    home: Path,
) -> None:
    base = llama_folder(home / "llama")
    before = contents(base)
    whole = [step.loss for step in train(home, f"hf:{base}", "phases=1")]
    run = train(home, f"hf:{base}", "phases=2")
    stop_after_three(run)
    files = checkpoints(run)[-1].glob("*.safetensors")
    names = [key for file in files for key in load_file(file) if key.startswith("weight/")]
    assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b"}

    shard = base / "model-00002-of-00002.safetensors"
    time = shard.stat().st_mtime_ns
    os.utime(shard, ns=(time, time + 1))
    with pytest.raises(CheckpointError, match=r"was changed since .* `touch -d @"):
        windlass.resume(run.folder, root=home / "runs")
    os.utime(shard, ns=(time, time))
    shard.rename(base / "away")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors.* is gone"):
        windlass.resume(run.folder, root=home / "runs")
    (base / "away").rename(shard)
    assert finish(run, home) == whole
    assert contents(base) == before


@pytest.mark.slow
def test_what_stands_in_another_order_is_kept_once_and_outlives_the_base(home: Path) -> None:
    model = gpt2_folder(home / "gpt2")  # its products are stored transposed
    run = train(home, model, "phases=2")
    loss = stop_after_three(run)
    shutil.rmtree(home / "gpt2")
    assert finish(run, home)[2] == loss
    first, last = (folder / "layer-0001.frozen.safetensors" for folder in checkpoints(run))
    assert first.samefile(last)
    assert "weight/block0.attention.input.weight" in load_file(last)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4])
def test_ranks_read_their_own_parts_of_a_base_that_stays_where_it_is(
    home: Path, experts: int
) -> None:
    base = llama_folder(home / "llama", experts=experts)
    whole = [step.loss for step in train(home, f"hf:{base}", "phases=1")]
    sharded = ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2", "phases=2")
    if experts:
        sharded = (*sharded, "parallel.expert=2")
    run = train(home, f"hf:{base}", *sharded)
    stop_after_three(run)
    names = [path.name for path in checkpoints(run)[-1].iterdir()]
    assert [name for name in names if name.endswith(".places.json")]
    assert not [name for name in names if ".frozen." in name]

    alone = ("parallel.data=1", "sharding.parameters=1", "sharding.optimizer=1", "phases=2")
    if experts:
        alone = (*alone, "parallel.expert=1")
    list(windlass.resume(run.folder, *alone, root=home / "runs"))
    losses = [step.loss for step in windlass.load(run.folder).steps]
    # Sums of float32 in another order over four steps.
    assert losses == pytest.approx(whole, rel=1e-5)
