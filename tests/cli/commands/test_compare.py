"""`windlass compare` and `windlass batch`: one request on many machines, or with many batches."""

import json
from pathlib import Path

import pytest

from command_line import Windlass

SMALL = ("gpt-tiny", "train.sequence=64", "train.batch=8")


def test_each_machine_is_offered_with_the_plan_that_it_would_get_alone(windlass: Windlass):
    done = windlass("compare", *SMALL, "--on", "v100", "h100", "--json")
    assert done.returncode == 0, done.stderr
    offers = json.loads(done.stdout)
    assert all(offer["predicted"] for offer in offers)
    assert offers[0]["tokens_per_second"] >= offers[1]["tokens_per_second"]
    for offer in offers:
        alone = windlass("plan", *SMALL, "--on", offer["machine"], "--json")
        assert json.loads(alone.stdout)["plan"] == offer["plan"]


def test_a_machine_that_is_too_small_says_by_how_much(windlass: Windlass):
    done = windlass(
        "compare", "gpt3-13b", "--on", "h100", "offload.optimizer=near", "recompute=full"
    )
    assert done.returncode == 1
    assert "no plan" in done.stdout
    assert "too little" in done.stdout


def test_a_global_batch_is_a_replicas_batch_times_replicas(windlass: Windlass):
    sizes = (4, 16, 64)
    words = ("--on", "dgx-h100", "parallel.data=4", "--sizes", *map(str, sizes))
    done = windlass("batch", *SMALL, *words, "--json")
    assert done.returncode == 0, done.stderr
    offers = json.loads(done.stdout)
    assert [offer["global_batch"] for offer in offers] == list(sizes)
    for offer in offers:
        batch, cut = offer["plan"]["batch"], offer["plan"]["parallel"]
        made = batch["micro"] * batch.get("accumulation", 1) * cut["data"]
        assert made == offer["global_batch"]


def test_the_fastest_batch_is_all_of_the_best(windlass: Windlass):
    done = windlass("batch", *SMALL, "--on", "h100", "--sizes", "1", "32")
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    assert done.stdout.count("100 %") == 1


@pytest.mark.parametrize("verb", ["compare", "batch"])
def test_the_answer_is_drawn_too(windlass: Windlass, tmp_path: Path, verb: str):
    more = ("--sizes", "4", "8") if verb == "batch" else ()
    done = windlass(verb, *SMALL, "--on", "h100", *more, "--picture", "answer.svg")
    assert done.returncode == 0, done.stderr
    assert "Predicted" in (tmp_path / "answer.svg").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("compare", *SMALL, "--on", "h100", "--picture", "answer.html"), "answer.svg"),
        (("batch", *SMALL, "--on", "h100", "--picture", "answer.gif"), ".png"),
        (("compare", *SMALL, "--on", "h10"), "did you mean `h100`"),
        (("compare", "gpt-tini"), "did you mean `gpt-tiny`"),
        (("compare", "gpt-tiny", "train.bach=3"), "did you mean `train.batch`"),
        (("compare", *SMALL, "--on"), "`--on` names no machine"),
        (("needed", "gpt-tiny", "--on"), "`--on` names no machine"),
        (("batch", *SMALL, "--on", "h100", "--sizes", "0"), "0 is no number of sequences"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_message(
    windlass: Windlass, words: tuple[str, ...], told: str
):
    done = windlass(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
