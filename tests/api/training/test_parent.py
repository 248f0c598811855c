"""Runs that start from a checkpoint of another run."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from factories import tiny_graph
from windlass.errors import (
    CheckpointError,
    InputErrors,
    PlanError,
    RecordError,
    RequestError,
)
from windlass.schema import CHECKPOINT_FOLDER, REQUEST_FILE, Step
from windlass.training.parent import find_parent, plan_of_child, request_of_child

MODEL, *OVERRIDES = TINY
STEPS = ("train.steps=9", "train.save_every=3", "train.keep=3")


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, `parent`, that has saved at steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"{n} and {n} is {2 * n}\n" for n in range(999)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        words = (*OVERRIDES, f"data.source={folder / 'text.txt'}", *STEPS)
        list(windlass.train(MODEL, *words, folder=folder / "parent"))
    return folder


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def losses(steps: windlass.Run | tuple[Step, ...]) -> list[float]:
    return [step.loss for step in steps]


def test_a_run_starts_from_its_parent_with_steps_of_its_own_and_records_it(runs: Path) -> None:
    child = windlass.train(None, "train.steps=2", parent="parent", root=runs)
    steps = list(child)

    record, parent = windlass.load(child.folder), windlass.load("parent", root=runs)
    assert [step.step for step in steps] == [1, 2]
    assert steps[0].loss < parent.steps[5].loss
    assert record.meta["parent"] == {
        "id": parent.id, "name": "parent", "step": 9, "continues": False,
        "checkpoint": find_parent(runs / "parent").checkpoint.manifest.checksum[:12],
    }  # fmt: skip
    assert record.parent == f"{parent.id[-6:]}@9"
    assert not record.faults
    assert f"started from run {record.parent}" in windlass.report(child.folder).read_text()
    assert f"from {record.parent}" in windlass.runs(root=runs)._repr_html_()


def test_a_run_that_goes_on_equals_one_that_was_never_interrupted(runs: Path) -> None:
    longer = windlass.train(
        None, parent=find_parent(runs / "parent@6", continues=True), folder=runs / "longer"
    )

    assert longer.done == 6
    assert "with its data order and learning rates" in longer.notes[-1]
    assert losses(longer) == losses(windlass.load("parent", root=runs).steps)[6:]
    assert not windlass.load(longer.folder).faults


def test_a_jump_of_the_learning_rate_is_said_with_the_rate_that_begins_where_the_parent_ended(
    runs: Path,
) -> None:
    parent = find_parent("parent", root=runs, continues=True)
    jumps = windlass.train(None, "train.steps=18", parent=parent, root=runs)
    said = re.search(
        r"jumps by a factor of (\S+), from (\S+) to (\S+); `train.learning_rate=(\S+)` begins",
        jumps.notes[-1],
    )
    assert said
    factor, before, after, rate = map(float, said.groups())
    assert parent.record.steps[-1].learning_rate == pytest.approx(before, rel=0.01)
    assert after == pytest.approx(factor * before, rel=0.02)
    assert factor > 2

    words = ("train.steps=18", f"train.learning_rate={rate}")
    smooth = windlass.train(None, *words, parent=parent, root=runs)
    assert "with its data order and learning rates" in smooth.notes[-1]
    assert next(iter(smooth)).learning_rate == pytest.approx(before, rel=0.02)


def test_a_child_that_was_interrupted_before_its_first_save_resumes_from_its_parent(
    runs: Path,
) -> None:
    words = ("train.steps=3", "train.save_every=3", "batch.micro=2")
    whole = losses(windlass.train(None, *words, parent=f"{runs / 'parent'}@3", root=runs))
    left = windlass.train(None, *words, parent=f"{runs / 'parent'}@3", root=runs)
    list(islice(left, 2))

    assert losses(windlass.resume(left.folder)) == whole


def test_a_child_that_has_lost_its_first_checkpoint_does_not_start_from_nothing(
    runs: Path,
) -> None:
    child = windlass.train(None, parent="parent", root=runs)
    list(islice(child, 1))
    (child.folder / CHECKPOINT_FOLDER / "step-00000000").rename(child.folder / "lost")

    with pytest.raises(CheckpointError, match="started from another run, whose checkpoint"):
        windlass.resume(child.folder)


def test_another_model_is_no_child(runs: Path) -> None:
    parent = find_parent("parent", root=runs)
    planned = windlass.plan(parent.record.request)
    narrow = replace(parent, record=replace(parent.record, graph=tiny_graph(layers=1, width=16)))
    deep = replace(parent, record=replace(parent.record, graph=tiny_graph(layers=4)))

    with pytest.raises(PlanError, match=r"its layer 0 has `tokens.weight` as \(64, 16\)"):
        plan_of_child(planned, narrow)
    with pytest.raises(PlanError, match="it has 6 layers, and `gpt-tiny` has 3"):
        plan_of_child(planned, deep)


def test_going_on_keeps_batch_and_seed_and_takes_more_steps(runs: Path) -> None:
    parent = find_parent(runs / "parent", continues=True)

    with pytest.raises(InputErrors) as error:
        windlass.train(None, "train.batch=8", "train.seed=1", parent=parent, root=runs)

    assert [message.split(",")[0] for message in error.value.messages] == [
        "`train.steps` = 9", "`train.batch` = 8", "`train.seed` = 1",
    ]  # fmt: skip


def test_another_tokenizer_than_the_parent_s_is_refused(runs: Path) -> None:
    with pytest.raises(RequestError, match="the tokenizer is not that of run `parent`"):
        windlass.train(
            None, "data.tokenizer=bpe", "data.vocabulary=257", parent="parent", root=runs
        )


def test_other_text_is_read_with_the_parent_s_trained_tokenizer(runs: Path) -> None:
    bpe = ("data.tokenizer=bpe", "data.vocabulary=257", "train.steps=1")
    words = (*OVERRIDES, f"data.source={runs / 'text.txt'}", *bpe)
    list(windlass.train(MODEL, *words, folder=runs / "trained-tokenizer"))
    (runs / "other.txt").write_text("entirely other words, over and over\n" * 400)

    child = windlass.train(
        None, f"data.source={runs / 'other.txt'}", parent="trained-tokenizer", root=runs
    )

    name = "tokenizer.json"
    assert child.planned.request.data.tokenizer == str(runs / "trained-tokenizer" / name)
    assert (child.folder / name).read_text() == (runs / "trained-tokenizer" / name).read_text()


def test_adapters_and_other_data_free_what_follows_from_the_parent_s_data(runs: Path) -> None:
    parent = find_parent("parent", root=runs)
    file = runs / "parent" / REQUEST_FILE

    def child(*words: str) -> dict[str, object]:
        request = windlass.make_request(None, *words, file=file)
        given = windlass.api.request_origins(None, *words)
        train = request_of_child(request, parent, given)[0].train
        return {key: getattr(train, key) for key in ("steps", "batch", "sequence", "learning_rate")}

    rate = child()["learning_rate"]
    assert rate is not None
    assert child() == {"steps": 9, "batch": 4, "sequence": 32, "learning_rate": rate}
    assert set(child("lora.rank=2").values()) == {None}
    assert child("data.limit_bytes=9000", "train.steps=7") == {
        "steps": 7, "batch": None, "sequence": None, "learning_rate": rate,
    }  # fmt: skip


def test_a_checkpoint_that_the_parent_does_not_keep_is_refused(runs: Path) -> None:
    with pytest.raises(CheckpointError, match="of step 5; it has those of 3 and 6 and 9"):
        find_parent("parent@5", root=runs)
    with pytest.raises(RecordError, match="no run"):
        find_parent("nothing", root=runs)
