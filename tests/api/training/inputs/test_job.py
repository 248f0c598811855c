"""What a plan says of its data, time and cost, and the data that a large job must name."""

from pathlib import Path

import pytest

import windlass
from command_line import TINY
from hub_folders import gpt2_folder
from windlass.api import describe_job, job_size
from windlass.cli.console import print_plan
from windlass.errors import DataError, InputErrors
from windlass.jobs.data import measure_data
from windlass.schema import Request
from windlass.training.inputs.job import require_named_data


def planned(*words: str, model: str = "gpt2-124m") -> windlass.Planned:
    return windlass.plan(model, *words, machine="h100")


def test_a_large_job_says_its_data_time_and_gpu_hours_before_anything_else():
    plan = planned()
    words = dict(describe_job(plan))
    job = job_size(plan)

    assert words["data"].startswith("Python's standard library, as no `data.source` is named")
    assert "tokenizer of 4,096 entries" in words["data"]
    assert "`train` and `launch` refuse" in words["data"]
    assert f"{job.passes:,.0f} times the data; predicted " in words["run"]
    assert words["run"].endswith(" GPU-hours")
    assert job.tokens == plan.request.train.steps * 512 * 1024
    assert job.device_hours == pytest.approx(job.seconds / 3600)


def test_a_large_job_on_text_and_tokenizer_that_nobody_named_is_refused_with_both_keys():
    with pytest.raises(InputErrors) as error:
        require_named_data(planned())

    text, tokenizer = error.value.messages
    assert "times over Python's standard library" in text
    assert "name yours as `data.source`" in text
    assert "4,096 entries would be trained for `gpt2-124m`, which has 50,257" in tokenizer
    assert "name its `tokenizer.json` as `data.tokenizer`" in tokenizer


def test_a_plan_is_printed_with_its_data_and_its_cost_first(capsys: pytest.CaptureFixture[str]):
    print_plan(planned("data.source=nowhere"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["model", "data", "run"]
    assert "GPU-hours" in " ".join(lines[:4])


def test_neither_train_nor_launch_begins_a_large_job_on_text_that_nobody_named(home: Path):
    large = windlass.plan(*TINY, "train.steps=1000000000")

    with pytest.raises(DataError, match="times over Python's standard library"):
        windlass.train(large, root=home / "runs")
    with pytest.raises(DataError, match="times over Python's standard library"):
        windlass.launch(large, nodes=1, root=home / "runs")
    assert not (home / "runs").exists()


def test_a_large_job_on_toy_data_that_are_named_runs():
    require_named_data(planned("data.source=stdlib", "data.vocabulary=4096"))
    with pytest.raises(DataError, match="a tokenizer of 4,096 entries"):
        require_named_data(planned("data.source=stdlib"))


def test_a_short_run_needs_no_data_of_its_own():
    require_named_data(planned("train.steps=100"))


def test_a_plan_is_answered_without_the_data(tmp_path: Path):
    plan = planned(f"data.source={tmp_path / 'elsewhere'}")
    assert dict(describe_job(plan))["data"].endswith("elsewhere`, not read for this plan")
    assert job_size(plan).passes is None


def size_of(*words: str, fine_tunes: bool = False) -> tuple[int | None, int | None] | None:
    """Rows and sequence that the defaults of a request follow from."""
    size = measure_data(Request.resolve(overrides=words), fine_tunes=fine_tunes)
    return size and (size.rows, size.sequence)


def test_the_sequence_of_conversations_is_as_long_as_the_longest_of_both_sides(tmp_path: Path):
    rows = ['{"prompt": "12", "completion": "3"}'] * 30 + [
        f'{{"prompt": "{"x" * 60}", "completion": "{n}"}}' for n in range(3)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    words = (f"data.source={tmp_path / 'chats.jsonl'}", "data.format=chat", "data.tokenizer=byte")

    count, sequence = size_of(*words) or (None, None)
    assert count is not None
    assert 20 < count < 33
    # 60 + 1 characters and two ends, of the conversation and of the text, of which the last one is
    # asked for alone: 62 inputs, in a multiple of 8.
    assert sequence == 64
    assert size_of(*words, "train.sequence=512") is None


def test_data_count_where_weights_are_trained_already_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words, and others\n" * 400)
    words = (f"data.source={tmp_path / 'text.txt'}", "data.tokenizer=byte")
    hub = f"model.name={gpt2_folder(tmp_path / 'gpt2')}"
    pins = ("train.batch=1", "train.sequence=8", "train.steps=1")

    assert size_of(*words) is None
    assert size_of(*words, fine_tunes=True) == size_of(*words, "lora.rank=2")
    assert size_of(*words, hub) == size_of(*words, fine_tunes=True) != None  # noqa: E711
    assert size_of(*words, hub, *pins) is None
