"""`windlass machines compare` and `windlass batch`: one model on many machines or batch sizes."""

import json
from pathlib import Path

import pytest

from command_line import Windlass

SMALL = ("gpt-tiny", "train.sequence=64", "train.batch=8")


def test_each_machine_gets_the_plan_that_it_would_get_alone(windlass: Windlass):
    done = windlass("machines", "compare", *SMALL, "--on", "v100", "h100", "--json")
    assert done.returncode == 0, done.stderr
    forecasts = json.loads(done.stdout)
    assert all(forecast["predicted"] for forecast in forecasts)
    assert forecasts[0]["tokens_per_second"] >= forecasts[1]["tokens_per_second"]
    for forecast in forecasts:
        alone = windlass("plan", *SMALL, "--on", forecast["machine"], "--json")
        assert json.loads(alone.stdout)["plan"] == forecast["plan"]


def test_a_machine_that_is_too_small_says_by_how_much(windlass: Windlass):
    pins = ("offload.optimizer=device", "recompute=full")
    done = windlass("machines", "compare", "gpt3-13b", "--on", "h100", *pins)
    assert done.returncode == 1
    assert "no plan" in done.stdout
    assert "too little" in done.stdout


def test_a_global_batch_is_micro_times_accumulation_times_data_parallel_degree(windlass: Windlass):
    sizes = (4, 16, 64)
    words = (
        "--on",
        "dgx-h100",
        "parallel.data=4",
        "parallel.tensor=1",
        "phases=1",
        "--sizes",
        *map(str, sizes),
    )
    done = windlass("batch", *SMALL, *words, "--json")
    assert done.returncode == 0, done.stderr
    forecasts = json.loads(done.stdout)
    assert [forecast["global_batch"] for forecast in forecasts] == list(sizes)
    for forecast in forecasts:
        batch, parallel = forecast["plan"]["batch"], forecast["plan"]["parallel"]
        product = batch["micro"] * batch.get("accumulation", 1) * parallel["data"]
        assert product == forecast["global_batch"]


def test_the_fastest_batch_has_100_percent_of_the_best_speed(windlass: Windlass):
    done = windlass("batch", *SMALL, "--on", "h100", "--sizes", "1", "32")
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    assert done.stdout.count("100 %") == 1


@pytest.mark.parametrize(
    ("command", "more"),
    [(("machines", "compare"), ()), (("batch",), ("--sizes", "4", "8"))],
    ids=["machines", "batches"],
)
def test_the_comparison_is_drawn_too(
    windlass: Windlass, tmp_path: Path, command: tuple[str, ...], more: tuple[str, ...]
):
    done = windlass(*command, *SMALL, "--on", "h100", *more, "--picture", "answer.svg")
    assert done.returncode == 0, done.stderr
    assert "Predicted" in (tmp_path / "answer.svg").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("machines", "compare", *SMALL, "--on", "h100", "--picture", "answer.html"), "answer.svg"),
        (("batch", *SMALL, "--on", "h100", "--picture", "answer.gif"), ".png"),
        (("machines", "compare", *SMALL, "--on", "h10"), "did you mean `h100`"),
        (("machines", "compare", "gpt-tini"), "did you mean `gpt-tiny`"),
        (("machines", "compare", "gpt-tiny", "train.bach=3"), "did you mean `train.batch`"),
        (("machines", "compare", *SMALL, "--on"), "`--on` names no machine"),
        (("smallest-machine", "gpt-tiny", "--on"), "`--on` names no machine"),
        (("batch", *SMALL, "--on", "h100", "--sizes", "0"), "should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_message(
    windlass: Windlass, words: tuple[str, ...], told: str
):
    done = windlass(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
