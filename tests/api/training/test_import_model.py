"""Hugging Face folders as runs, and written again as they were."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import windlass
from hub_folders import gpt2_folder
from windlass.atomic_files import hash_file
from windlass.errors import RecordError, RequestError


def imported(home: Path) -> tuple[Path, Path]:
    """A folder whose tensors have several types, and the run that is made of it."""
    gpt2_folder(home / "gpt2")
    file = home / "gpt2" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float32 if "ln_" in name else torch.bfloat16)
    # A buffer of older files, which is no weight.
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    save_file(tensors, file)
    (home / "gpt2" / "chat_template.jinja").write_text("{{ messages }}")
    return home / "gpt2", windlass.import_model(home / "gpt2", root=home / "runs")


def test_a_folder_is_written_again_byte_for_byte(home: Path):
    folder, run = imported(home)

    windlass.export(run, to=f"hf:{home / 'out'}")

    before, after = (stored(path / "model.safetensors") for path in (folder, home / "out"))
    assert before == after
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (home / "out" / name).read_bytes() == (folder / name).read_bytes()


def stored(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor of a file."""
    with safe_open(file, framework="pt") as content:
        return {
            name: (
                content.get_slice(name).get_dtype(),
                content.get_slice(name).get_shape(),
                content.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name in content.keys()  # noqa: SIM118  no mapping
        }


def test_an_imported_run_keeps_types_and_writes_text(home: Path):
    folder, run = imported(home)
    before = hash_file(folder / "model.safetensors")

    size = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.safetensors"))
    text = "".join(windlass.sample(run, "one", tokens=4, temperature=0.0))

    # Numbers of two bytes stay so: the rest is headers, norms and the buffer that is left out.
    assert size < 1.2 * (folder / "model.safetensors").stat().st_size
    assert isinstance(text, str)
    assert hash_file(folder / "model.safetensors") == before


def test_an_imported_run_is_asked_in_the_chat_template_of_its_folder(home: Path):
    folder, run = imported(home)
    (folder / "chat_template.jinja").write_text("one {{ messages[0].content }}:")

    asked, plain = (
        "".join(windlass.sample(run, prompt, tokens=6, temperature=0.0, chat=chat))
        for prompt, chat in (("two", True), ("one two:", False))
    )

    assert asked == plain


def test_a_run_without_a_chat_template_is_not_asked_in_one(home: Path):
    folder, run = imported(home)
    (folder / "tokenizer.json").unlink()

    with pytest.raises(RequestError, match="keeps no chat template; leave out `--chat`"):
        next(windlass.sample(run, "two", chat=True))


def test_imported_weights_are_trained_by_their_folder(home: Path):
    folder, run = imported(home)

    for call in (windlass.resume, windlass.find_parent):
        with pytest.raises(RecordError, match=rf"windlass train hf:{folder}"):
            call(run)


def test_large_weights_are_written_in_shards_with_an_index(home: Path):
    from windlass.models import build_layer_stack, export_layout, model_config
    from windlass.runtime import export_huggingface, latest_checkpoint

    folder, run = imported(home)
    name = f"hf:{folder}"
    stack = build_layer_stack(name, {}, device="meta", weightless=True)
    layout = export_layout(model_config(name), stack.tied_weights, tokenizer=None)
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    export_huggingface(checkpoint, stack, layout, home / "out", shard_bytes=4000)

    files = sorted((home / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert {k: v for file in files for k, v in stored(file).items()} == stored(
        folder / "model.safetensors"
    )
    shutil.rmtree(folder)
    shutil.move(home / "out", folder)
    assert windlass.plan(name).graph.vocabulary == 260
    assert build_layer_stack(name, {}, device="cpu").weights is not None
