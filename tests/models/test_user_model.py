"""Models built by a function in a user's file."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack, layer_stack_of

GOOD = """
import torch
from torch import nn
from neighbour import WIDTH

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + self.scale * self.up(x).relu()

def build(layers=2, vocabulary=50):
    return nn.Sequential(
        nn.Embedding(vocabulary, WIDTH),
        *[Block() for _ in range(layers)],
        nn.Linear(WIDTH, vocabulary),
    )

def broken():
    return nn.Linear(3, undefined_name)

def number():
    return 3

def frozen(layers=2):
    model = build(layers)
    model[1].up.requires_grad_(False)
    return model

def needs(width):
    return nn.Linear(width, width)

def nano(n_layer=2, vocab_size=50, n_embd=16, hidden=16):
    return build(n_layer, vocab_size)

def two_widths(n_embd=16, hidden=16):
    return build()

def any_(**arguments):
    return build(arguments["count"])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 16\n")
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_a_file_that_does_not_import_windlass_gives_a_stack(file: Path):
    stack = build_layer_stack(f"{file}:build", {}, device="meta", seed=0)

    assert stack.kinds == ("embedding", "block", "block", "linear")
    assert stack.vocabulary == 50
    assert all(p.is_meta for layer in stack.layers for p in layer.parameters())


def test_model_arguments_are_arguments_of_the_function(file: Path):
    stack = build_layer_stack(
        f"{file}:build", {"layers": 4, "vocabulary": 60}, device="meta", seed=0
    )

    assert (len(stack.layers), stack.vocabulary) == (6, 60)


@pytest.mark.parametrize(
    "arguments", [{"n_layer": 4, "vocab_size": 60}, {"layers": 4, "vocabulary": 60}]
)
def test_arguments_are_set_by_their_names_or_usual_ones_for_the_same_size(
    file: Path, arguments: dict[str, int]
):
    stack = build_layer_stack(f"{file}:nano", arguments, device="meta", seed=0)

    assert (len(stack.layers), stack.vocabulary) == (6, 60)


def test_a_function_of_any_keywords_is_given_them_as_they_are(file: Path):
    stack = build_layer_stack(f"{file}:any_", {"count": 3}, device="meta", seed=0)
    assert len(stack.layers) == 5


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("nano", {"n_layr": 3}, "it takes no `n_layr`, .* did you mean `n_layer`"),
        ("build", {"colour": 3}, "`model.colour` cannot be set; it takes `layers`, `vocabulary`"),
        ("nano", {"layers": 3, "n_layer": 2}, "`model.layers` is its `n_layer`, which is set by"),
        ("nano", {"layers": 3, "depth": 2}, "`model.depth` is its `n_layer`, which is set by"),
        ("two_widths", {"width": 8}, "`model.width` may be its `n_embd` or its `hidden`"),
        ("needs", {}, "its argument `width` has no default and is not set; set `model.width`"),
    ],
)
def test_an_argument_that_cannot_be_told_is_one_sentence(
    file: Path, function: str, arguments: dict[str, int], words: str
):
    with pytest.raises(ModelError, match=words):
        build_layer_stack(f"{file}:{function}", arguments, device="meta", seed=0)


def test_real_weights_come_from_the_seed(file: Path):
    one, same, other = (
        build_layer_stack(f"{file}:build", {}, device="cpu", seed=seed) for seed in (1, 1, 2)
    )

    assert torch.equal(one.layers[0].weight, same.layers[0].weight)
    assert not torch.equal(one.layers[0].weight, other.layers[0].weight)
    assert one.layers[1].scale.eq(0.5).all()


def test_the_search_path_is_left_as_it_was(file: Path):
    before = list(sys.path)

    build_layer_stack(f"{file}:build", {}, device="meta", seed=0)

    assert sys.path == before


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("broken", {}, r"NameError at .*mine\.py:23: name 'undefined_name' is not defined"),
        ("number", {}, "returned a `int`, must return an `nn.Module`"),
        ("biuld", {}, "no function `biuld` in the file; did you mean `build`"),
        ("build", {"heads": 2}, "takes no `heads`, so `model.heads` cannot be set"),
        ("needs", {}, "its argument `width` has no default and is not set"),
    ],
)
def test_an_error_in_the_file_is_one_sentence(
    file: Path, function: str, arguments: dict[str, int], message: str
):
    with pytest.raises(ModelError, match=message):
        build_layer_stack(f"{file}:{function}", arguments, device="meta", seed=0)


def test_a_syntax_error_is_reported_with_its_line(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\ndef build(:\n")

    with pytest.raises(ModelError, match=r"SyntaxError at .*mine\.py:2"):
        build_layer_stack(f"{path}:build", {}, device="meta", seed=0)


def test_a_missing_file_and_a_missing_function_are_reported(tmp_path: Path):
    with pytest.raises(ModelError, match="no file"):
        build_layer_stack(f"{tmp_path}/none.py:build", {}, device="meta", seed=0)
    with pytest.raises(ModelError, match=r"names no function; write .*:function"):
        build_layer_stack(f"{tmp_path}/none.py", {}, device="meta", seed=0)


def test_frozen_weights_of_a_file_stay_frozen(file: Path):
    stack = build_layer_stack(f"{file}:frozen", {}, device="meta", seed=0)

    frozen = [
        f"{name}.{path}"
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, weight in layer.named_parameters()
        if not weight.requires_grad
    ]
    assert frozen == ["1.up.weight", "1.up.bias"]
    assert stack.kinds == ("embedding", "block", "block2", "linear")


def test_a_module_of_which_nothing_would_be_trained_is_refused():
    module = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).requires_grad_(False)

    with pytest.raises(ModelError, match=r"all 3 weights of `mine` are frozen"):
        layer_stack_of(module, "mine", {}, device="cpu", seed=0)
