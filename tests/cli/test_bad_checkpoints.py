"""Checkpoints, data and modules of others with a fault: one clear message, nothing is changed."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Windlass
from hub_folders import SIZES, gpt2_folder
from windlass.atomic_files import hash_file

MODEL = "model"
BRANCHES = """
import torch
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else x
        return self.head(x)


def build():
    return Branches()
"""


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: _write(folder / MODEL / "config.json", json.dumps(SIZES | changes))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def no_config(folder: Path) -> None:
    (folder / MODEL / "config.json").unlink()


def adapter(folder: Path) -> None:
    no_config(folder)
    _write(folder / MODEL / "adapter_config.json", json.dumps({"peft_type": "LORA", "r": 8}))


def disguised(folder: Path) -> None:
    (folder / MODEL / "model.safetensors").write_bytes(pickle.dumps({"wte.weight": 1}))


def pickled(folder: Path) -> None:
    (folder / MODEL / "model.safetensors").rename(folder / MODEL / "pytorch_model.bin")


def other_tokenizer(folder: Path) -> None:
    gpt2_folder(folder / "other", vocabulary=200)
    (folder / "other" / "config.json").rename(folder / MODEL / "config.json")
    (folder / "other" / "model.safetensors").rename(folder / MODEL / "model.safetensors")


def missing_shard(folder: Path) -> None:
    (folder / MODEL / "model.safetensors").rename(folder / MODEL / "a.safetensors")
    places = {"weight_map": {"wte.weight": "b.safetensors"}}
    _write(folder / MODEL / "model.safetensors.index.json", json.dumps(places))


def no_answers(folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": "2 + 2?"}]}
    _write(folder / "chats.jsonl", json.dumps(row) + "\n")


def branches(folder: Path) -> None:
    _write(folder / "branches.py", BRANCHES)


def unchanged(_: Path) -> None:
    """The folder is good; what is asked for is not."""


HUB, CHATS = ("train", f"hf:{MODEL}"), ("data.source=chats.jsonl", "data.format=chat")
CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "no config": (no_config, HUB, "config.json"),
    "only an adapter": (adapter, HUB, "config.json"),
    "unknown type": (config(model_type="gpt-2"), HUB, "did you mean `gpt2`"),
    "other shapes": (config(n_embd=32), HUB, "wte.weight"),
    "tokenizer of another size": (other_tokenizer, HUB, "200"),
    "no answers": (no_answers, (*HUB, *CHATS), "chats.jsonl:1: no answer"),
    "pickle": (pickled, HUB, "can run any code"),
    "pickle in disguise": (disguised, HUB, "is no safetensors file"),
    "missing shard": (missing_shard, HUB, "b.safetensors"),
    "sharded state of its own format": (
        unchanged, (*HUB, "train.optimizer=muon", "moments=int8"), "moments",
    ),
    "branches on data": (branches, ("train", "branches.py:build"), "branches.py"),
}  # fmt: skip


def hashes(folder: Path) -> dict[str, str]:
    return {str(path): hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_things_of_others_is_one_message_and_changes_nothing(
    case: str, refused: Windlass, tmp_path: Path
) -> None:
    plant, words, reason = CASES[case]
    gpt2_folder(tmp_path / MODEL)
    plant(tmp_path)
    text = "".join(f"{number} times {number}\n" for number in range(2000))
    _write(tmp_path / "text.txt", text)
    before = hashes(tmp_path)
    source = () if "data.source" in " ".join(words) else ("data.source=text.txt",)

    ended = refused(*words, *source, "train.steps=2", "train.batch=2", "train.sequence=16")

    assert ended.returncode == 2, ended.stderr
    assert reason in ended.stderr
    assert ended.stderr.startswith("windlass: ")
    assert "Traceback" not in ended.stderr
    assert hashes(tmp_path) == before
