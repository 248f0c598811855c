"""How much memory do import and export take? Of a Llama of 8 GB in bfloat16, in a file a layer.

    python benchmarks/import_memory.py FOLDER [--layers 36]

Makes the checkpoint in a folder, imports it, exports the run, each in a process of its own, and
appends the largest resident memory of both, mapped files included.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from results import append_row
from windlass.models import build_layer_stack, export_layout, model_config

SIZES = {
    "model_type": "llama", "hidden_size": 3072, "num_attention_heads": 24, "vocab_size": 128256,
    "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


def main() -> None:
    """Makes the checkpoint, measures, and appends a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    words = parser.parse_args()
    source, runs, out = (words.folder / name for name in ("model", "runs", "out"))
    nbytes = make_checkpoint(source, words.layers)
    measured: dict[str, object] = {}
    for command in (
        ("import", str(source), "--runs", str(runs)),
        ("export", "last", "--runs", str(runs), "--to", f"hf:{out}"),
    ):
        start = time.perf_counter()
        subprocess.run((sys.executable, "-m", "windlass", *command), check=True)
        measured[f"{command[0]}_seconds"] = round(time.perf_counter() - start, 1)
        # The largest of all children so far: both stay below it.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        measured[f"{command[0]}_peak_bytes"] = peak
    shutil.rmtree(words.folder)
    append_row("import_memory", checkpoint_bytes=nbytes, **measured)
    print(nbytes, measured)


def make_checkpoint(folder: Path, layers: int) -> int:
    """Writes random weights in a file a layer; returns their bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SIZES, "num_hidden_layers": layers}))
    name = f"hf:{folder / 'config.json'}"
    stack = build_layer_stack(name, {}, device="meta")
    layout = export_layout(model_config(name), stack.tied_weights, tokenizer=None)
    places: dict[str, str] = {}
    nbytes = 0
    for index, (layer_name, layer) in enumerate(zip(stack.names, stack.layers, strict=True)):
        tensors = {}
        for path, parameter in layer.named_parameters():
            if f"{layer_name}.{path}" not in stack.tied_weights:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(std=0.02)
                tensors |= dict(layout.names.split(f"{layer_name}.{path}", value))
        file = f"layer-{index}.safetensors"
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return nbytes


if __name__ == "__main__":
    main()
