"""`windlass dataflow`: traffic of a layer by how far its ops are fused."""

import json
from pathlib import Path

import pytest

from command_line import Windlass

LAYER = ("gpt3-13b", "--role", "feed-forward", "--on", "sn30-rdu")


def test_a_report_says_that_it_is_predicted_and_names_each_edge(windlass: Windlass):
    done = windlass("dataflow", *LAYER)
    assert done.returncode == 0, done.stderr
    for words in ("all numbers predicted", "797 MB", "461 MB", "hidden.output.weight", "ridge"):
        assert words in done.stdout


def test_sparse_weights_of_a_request_move_as_much_as_the_published_figure_says(windlass: Windlass):
    done = windlass("dataflow", *LAYER, "sparsity.level=0.875", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["predicted"]
    forward = next(each for each in report["passes"] if each["name"] == "forward")
    megabytes = [level["far_bytes"] / 1e6 for level in forward["levels"]]
    # The biases, which the figure leaves out, are 0.05 MB.
    assert [round(each - 0.05) for each in megabytes] == [430, 262, 94]


def test_several_machines_are_compared_and_drawn(windlass: Windlass, tmp_path: Path):
    shares = ("--sparsity", "0.5,0,0.5")
    done = windlass("dataflow", *LAYER, "wse-2", "h200", *shares, "--svg", "curves.svg")
    assert done.returncode == 0, done.stderr
    for machine in ("sn30-rdu", "wse-2", "h200"):
        assert machine in done.stdout
        assert machine in (tmp_path / "curves.svg").read_text()


def test_a_model_of_ones_own_has_a_report_too(windlass: Windlass, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Residual(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))\n"
        "    def forward(self, x):\n"
        "        return x + self.mlp(x)\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(50, 8), Residual(), Residual(), nn.Linear(8, 50))\n"
    )
    words = ("--role", "feed-forward", "--on", "h100", "train.sequence=64", "--json")
    done = windlass("dataflow", "own.py:build", *words)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert [op["name"] for op in report["passes"][0]["ops"]] == ["addmm", "gelu", "addmm"]
    assert [op["weight"] for op in report["passes"][0]["ops"]] == [
        "mlp.0.weight", None, "mlp.2.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--sparsity", "1"), "at least 0 and less than 1"),
        (("--sparsity", "-0.5"), "at least 0 and less than 1"),
        (("--sparsity", "half"), "is no list of numbers"),
        (("--kind", "blok"), "did you mean `block`"),
        (("--kind", "embedding"), "belongs to its feed-forward branch"),
        (("precision=float8",), "float32 or bfloat16"),
        (("--stack", "nemo"), "neither software nor budget"),
        (("--memory", "4GiB"), "neither software nor budget"),
        (("train.sequence=4096",), "takes at most 2048"),
        (("--svg", "drawing.txt"), "is no picture that can be drawn"),
        (("sparsity.level=0.875", "--on", "h100"), "name one machine"),
        (("--on", "nowhere"), "unknown machine"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_the_way_out(
    windlass: Windlass, words: tuple[str, ...], reason: str
):
    done = windlass("dataflow", *LAYER, *words)
    assert done.returncode == 2, done.stdout
    assert reason in done.stderr
