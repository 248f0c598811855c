"""Files of masks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from windlass.errors import ModelError
from windlass.sparsity import LayerMask, load_masks, save_masks


def test_masks_survive_their_file_and_one_layer_is_read_alone(tmp_path: Path):
    blocks = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    dense = torch.tensor([[True, False, True]])
    masks = {"block0.up": LayerMask(32, 32, 16, blocks), "block1.up": LayerMask(1, 3, None, dense)}
    save_masks(tmp_path / "masks.safetensors", masks)
    loaded = load_masks(tmp_path / "masks.safetensors")
    assert loaded.keys() == masks.keys()
    for name, mask in masks.items():
        assert loaded[name][:3] == mask[:3]
        assert torch.equal(loaded[name].kept, mask.kept)
    assert list(load_masks(tmp_path / "masks.safetensors", layer="block1")) == ["block1.up"]


def test_a_file_that_holds_no_masks_is_refused_in_one_sentence(tmp_path: Path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name, message in (
        ("weights.safetensors", "holds no masks; write such a file by `windlass export"),
        ("text.safetensors", "cannot be read"),
        ("missing.safetensors", "cannot be read"),
    ):
        with pytest.raises(ModelError, match=message):
            load_masks(tmp_path / name)
