"""`windlass smallest-machine`: the smallest machine of each family on which a model fits."""

import json
from pathlib import Path

import pytest

from command_line import Windlass

WIDE = ("gpt-tiny", "model.layers=2", "model.width=1536", "model.heads=8", "train.batch=4",
        "train.sequence=64", "parallel.tensor=1")  # fmt: skip
"""64 M parameters, whose state of 1 GiB one IPU has no room for and four have. Without tensor
parallelism only one degree has to be captured."""


def test_the_smallest_machine_is_one_that_fits_and_below_which_none_does(windlass: Windlass):
    words = ("--in-memory", "--on", "ipu-m2000", "dgx-a100-80gb", "--json")
    done = windlass("smallest-machine", *WIDE, *words)
    assert done.returncode == 0, done.stderr
    pod, gpu = json.loads(done.stdout)
    assert (pod["machine"], gpu["machine"], gpu["devices"]) == ("ipu-pod4", "a100-80gb", 1)
    assert all(
        peak["peak_bytes"] <= peak["capacity_bytes"]
        for need in (pod, gpu)
        for peak in need["prediction"]["peaks"]
    )
    below = windlass("fit", *WIDE, "--on", "gc200", "offload.optimizer=device")
    assert below.returncode == 1


def test_layers_may_take_turns_unless_told_otherwise(windlass: Windlass):
    done = windlass("smallest-machine", *WIDE, "--on", "ipu-m2000", "--json")
    assert json.loads(done.stdout)[0]["machine"] == "gc200"
    assert done.stderr == ""


def test_the_flag_that_is_the_default_now_answers_with_the_one_that_is_not(windlass: Windlass):
    done = windlass("smallest-machine", *WIDE, "--on", "gc200", "--in-phases", "--json")
    assert json.loads(done.stdout)[0]["machine"] == "gc200"
    assert "`--in-memory` keeps all in device memory" in done.stderr


def test_a_model_that_fits_no_machine_has_none(windlass: Windlass):
    done = windlass("smallest-machine", *WIDE, "--on", "gc200", "--in-memory", "--json")
    (need,) = json.loads(done.stdout)
    assert need["machine"] is None
    assert need["machines_tried"] == []


def test_the_result_is_a_table_and_a_picture(windlass: Windlass, tmp_path: Path):
    done = windlass("smallest-machine", *WIDE, "--on", "dgx-a100-80gb", "--picture", "machines.svg")
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    assert "a100-80gb" in done.stdout
    drawn = (tmp_path / "machines.svg").read_text()
    assert "How many devices" in drawn
    assert "Predicted" in drawn


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("gpt-tini",), "did you mean `gpt-tiny`"),
        (("gpt-tiny", "--on", "dgx-h10"), "did you mean `dgx-h100`"),
        (("gpt-tiny", "train.bach=3"), "did you mean `train.batch`"),
        (("gpt-tiny", "--picture", "x.html"), "x.svg"),
        (("gpt-tiny", "--picture", "x.gif"), ".png"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_message(
    windlass: Windlass, words: tuple[str, ...], told: str
):
    done = windlass("smallest-machine", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
