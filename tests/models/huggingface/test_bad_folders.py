"""What is wrong with a Hugging Face folder is said at once, by name, and nothing is guessed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hub_folders import gpt2_folder
from windlass.errors import InputErrors, ModelError
from windlass.models.build import build_layer_stack
from windlass.models.catalog import model_config
from windlass.models.huggingface.model_folder import find_model_folder

CONFIG: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 20, "hidden_act": "silu",
    "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (20, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (20, 8),
}


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """The tensors of the model; a change replaces or adds one, and None leaves it out."""
    whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | changes
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


def folder(path: Path, *, weights: Mapping[str, Tensor] | None = None, **changes: object) -> str:
    """A folder with the model, as a name; None as a key's value leaves it out."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors() if weights is None else weights), path / "model.safetensors")
    return f"hf:{path}"


def test_a_good_folder_is_built(tmp_path: Path):
    assert len(build_layer_stack(folder(tmp_path), {}, device="meta").layers) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "lama"}, "did you mean `llama`"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"vocab_size": "20"}, '`vocab_size` is "20", must be a whole number'),
        ({"rms_norm_eps": True}, "`rms_norm_eps` is true, must be a number"),
        ({"rms_norm_eps": -1}, "`rms_norm_eps` is -1, must be at least 0"),
        ({"rope_theta": 0.0}, "`rope_theta` is 0.0, must be above 0"),
        ({"hidden_act": "relu"}, "`hidden_act` is `relu`; can be read: `silu`"),
        ({"head_dim": "16"}, '`head_dim` is "16", must be a whole number'),
        ({"hidden_size": 10**30, "architectures": [["x"]]}, "must be at most 16777216"),
        ({"num_hidden_layers": 5000}, "`num_hidden_layers` is 5000, must be at most 4096"),
        ({"rope_theta": float("inf")}, "`rope_theta` is Infinity, must be a finite number"),
        (
            {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
            '`rope_scaling.type` is `["linear"]`',
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "`rope_scaling.type` is `dynamic`"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "`rope_scaling.original_sequence` is 0, must be at least 1",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "is 0.5, must be at least 1"),
        ({"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` = 50.0 is not known"),
        ({"num_attention_heads": 3}, "`width` 8 is not divisible by `heads` 3"),
    ],
)
def test_a_shape_that_our_layers_do_not_have_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], words: str
):
    with pytest.raises(ModelError) as error:
        model_config(folder(tmp_path, **changes))

    assert words in str(error.value)
    assert "config.json" in str(error.value)


def test_all_that_is_wrong_with_a_config_is_said_at_once(tmp_path: Path):
    with pytest.raises(ModelError) as error:
        model_config(folder(tmp_path, hidden_act="relu", vocab_size=None, logit_scale=2))

    for key in ("hidden_act", "vocab_size", "logit_scale"):
        assert f"`{key}`" in str(error.value)


def test_a_folder_without_config_names_the_one_inside_that_has_it(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    folder(tmp_path / "inner")

    with pytest.raises(ModelError, match=r"has no `config.json`.*did you mean `hf:.*inner`"):
        model_config(f"hf:{tmp_path}")


def test_every_missing_unknown_and_misshapen_tensor_is_named(tmp_path: Path):
    wrong = {
        "model.norm.weight": None,
        "lm_head.weight": torch.zeros(21, 8),
        "model.norm.bias": torch.zeros(8),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(12, 8, dtype=torch.int8),
    }
    name = folder(tmp_path, weights=tensors(**wrong))

    with pytest.raises(InputErrors) as error:
        build_layer_stack(name, {}, device="meta")

    assert len(error.value.messages) == 4
    for tensor in wrong:
        assert f"`{tensor}`" in str(error.value)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path):
    equal = folder(tmp_path, tie_word_embeddings=True)
    build_layer_stack(equal, {}, device="meta")

    name = folder(
        tmp_path,
        weights=tensors(**{"lm_head.weight": torch.ones(20, 8)}),
        tie_word_embeddings=True,
    )
    with pytest.raises(InputErrors, match=r"are tied by its `config.json`, and differ"):
        build_layer_stack(name, {}, device="meta")


def test_pickles_are_refused_with_the_way_out(tmp_path: Path):
    name = folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"can run any code.*save_pretrained"):
        build_layer_stack(name, {}, device="meta")


def test_a_pickle_in_disguise_is_refused_unread(tmp_path: Path):
    name = folder(tmp_path)
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match="is no safetensors file"):
        build_layer_stack(name, {}, device="meta")


def sharded(path: Path, **places: str) -> str:
    """The folder with its weights in two files, and an index in which some places are changed."""
    name = folder(path)
    (path / "model.safetensors").unlink()
    names = sorted(SHAPES)
    halves = {"a.safetensors": names[:6], "b.safetensors": names[6:]}
    for file, part in halves.items():
        save_file({each: torch.zeros(SHAPES[each]) for each in part}, path / file)
    index = {each: file for file, part in halves.items() for each in part} | places
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return name


def test_shards_are_read_by_their_index(tmp_path: Path):
    assert build_layer_stack(sharded(tmp_path), {}, device="cpu").layers[1].training


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"lm_head.weight": "c.safetensors"}, "names `c.safetensors`, which is not in the folder"),
        ({"lm_head.weight": "../a.safetensors"}, "which is not in the folder"),
        ({"lm_head.weight": "b.safetensors"}, "says that `b.safetensors` has `lm_head.weight`"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, places: dict[str, str], words: str
):
    with pytest.raises(InputErrors) as error:
        build_layer_stack(sharded(tmp_path, **places), {}, device="meta")

    assert words in str(error.value)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    name = sharded(tmp_path)
    save_file(tensors(), tmp_path / "b.safetensors")

    with pytest.raises(InputErrors, match="stands in 2 files"):
        build_layer_stack(name, {}, device="meta")


def test_a_key_that_stands_twice_is_refused(tmp_path: Path):
    name = folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "gpt2"}')

    with pytest.raises(ModelError, match="key `model_type` stands there twice"):
        model_config(name)


def test_trained_weights_keep_their_shape(tmp_path: Path):
    name = folder(tmp_path)

    with pytest.raises(ModelError, match=r"`model.width` would change.*config.json"):
        build_layer_stack(name, {"width": 16}, device="meta")

    assert build_layer_stack(f"{name}/config.json", {"width": 16}, device="meta").weights is None


def test_a_small_file_is_carried_from_the_hubs_cache_and_through_no_other_link(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "a1"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    name = gpt2_folder(snapshot)
    (snapshot / "config.json").rename(blobs / "c0")
    (snapshot / "config.json").symlink_to(Path("../../blobs/c0"))
    (snapshot / "vocab.json").symlink_to(secret)
    folder = find_model_folder(name)

    assert folder.read_small_file("config.json") == (blobs / "c0").read_bytes()
    assert folder.read_small_file("merges.txt") is None
    with pytest.raises(ModelError, match=r"vocab\.json` is a link to `.*secret`, outside"):
        folder.read_small_file("vocab.json")
