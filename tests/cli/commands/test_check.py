"""`windlass check` and `windlass rehearse` on local processes."""

import json
from pathlib import Path

import pytest

from command_line import Windlass
from factories import tiny_graph, tiny_machine, tiny_plan

TINY = (
    "gpt-tiny", "model.layers=1", "model.width=16", "model.heads=2", "model.vocabulary=257",
    "data.tokenizer=byte", "data.limit_bytes=65536", "train.batch=4", "train.sequence=16",
    "compile=false",
)  # fmt: skip


def test_check_verifies_a_plan_for_two_processes(windlass: Windlass) -> None:
    done = windlass("check", *TINY, "parallel.pipeline=2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["equal"]
    assert told["verification"]["first_mismatch"] is None
    assert {each["quantity"] for each in told["verification"]["comparisons"]} >= {
        "loss",
        "weight",
        "output",
        "held-out loss",
    }
    assert all(each["error"] <= 1e-9 for each in told["verification"]["comparisons"])
    assert told["plain_pytorch"]["first_mismatch"] is None
    assert told["events"] == {"end of the warm-up": 2, "evaluation": 4}
    assert any("how text becomes tokens" in each for each in told["not_compared"])


SPARSE = (
    "gpt-tiny", "model.layers=1", "model.width=64", "model.heads=4", "model.vocabulary=257",
    "data.tokenizer=byte", "data.limit_bytes=65536", "train.batch=4", "train.sequence=16",
    "sparsity.level=0.5", "sparsity.block=16",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("parallel.pipeline=2",),
        ("parallel.tensor=2",),
        ("parallel.data=2",),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
        ("phases=3",),
        ("compile=true",),
        ("parallel.tensor=2", "parallel.data=2", "sharding.parameters=2"),
        ("sparsity.pattern=block-diagonal", "parallel.tensor=2"),
        ("sparsity.pattern=unstructured", "parallel.tensor=2"),
        ("sparsity.pattern=2:4", "phases=3"),
        ("recompute=selective",),
    ],
    ids=" ".join,
)
def test_check_verifies_sparse_layers_under_any_plan(
    words: tuple[str, ...], windlass: Windlass
) -> None:
    assert_equal_to_one_device(windlass, *SPARSE, *words)


def assert_equal_to_one_device(windlass: Windlass, *words: str) -> None:
    done = windlass("check", *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["plain_pytorch"]["first_mismatch"] is None


MODERN = (
    "modernbert-base", "model.layers=3", "model.width=32", "model.heads=4", "train.sequence=96",
    "model.vocabulary=258", "data.tokenizer=byte", "data.limit_bytes=65536", "train.batch=4",
    "compile=false",
)  # fmt: skip


PACKED = (
    "bert-tiny", "model.layers=3", "model.width=32", "model.heads=2", "train.sequence=256",
    "model.vocabulary=258", "data.tokenizer=byte", "data.limit_bytes=65536", "train.batch=4",
    "data.packing=true", "compile=false",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("phases=3",),
        ("parallel.pipeline=2",),
        ("parallel.tensor=2",),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
    ],
)
def test_check_verifies_packed_masked_text(words: tuple[str, ...], windlass: Windlass) -> None:
    assert_equal_to_one_device(windlass, *PACKED, *words)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["parallel.pipeline=2", "parallel.tensor=2", "phases=3"])
def test_check_verifies_local_and_global_attention_in_turn(words: str, windlass: Windlass) -> None:
    assert_equal_to_one_device(windlass, *MODERN, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("phases=3",),
        ("parallel.pipeline=2", "parallel.schedule=zero-bubble"),
        ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
    ],
)
def test_check_verifies_a_fused_loss(windlass: Windlass, words: tuple[str, ...]) -> None:
    done = windlass("check", *TINY, "loss=fused", *words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]


@pytest.mark.slow
def test_check_injects_faults_and_detects_them_all(windlass: Windlass) -> None:
    words = ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2")
    done = windlass("check", *TINY, *words, "--faults")
    assert done.returncode == 0, done.stderr
    assert "7 of 7 injected faults detected" in done.stdout
    assert "a tensor-parallel sum left out, which needs `parallel.tensor` above 1" in done.stdout


@pytest.fixture
def large_plan(tmp_path: Path) -> Path:
    """A plan of two devices for a model that no process here could hold."""
    graph = tiny_graph(layers=24).model_copy(update={"name": "gpt3-175b"})
    plan = tiny_plan(
        graph, tiny_machine(devices=2), pipeline=2, accumulation=64, recompute="full",
        precision="bfloat16",
    )  # fmt: skip
    path = tmp_path / "plan.toml"
    plan.save(path)
    return path


@pytest.mark.slow
def test_a_large_plan_is_rehearsed_downscaled_and_the_changes_are_listed(
    windlass: Windlass, large_plan: Path
) -> None:
    done = windlass("rehearse", "--plan", str(large_plan))
    assert done.returncode == 0, done.stderr
    assert "equal to one device over 3 steps" in done.stdout
    assert "`batch.accumulation` 64 -> 4" in done.stdout
    assert "`layers` 26 -> 16" in done.stdout
    assert "width 12288 -> 32" in done.stdout


def test_a_users_own_model_cannot_be_downscaled(refused: Windlass, large_plan: Path) -> None:
    text = large_plan.read_text().replace("gpt3-175b@", "mine.py:model@")
    large_plan.write_text(text)
    done = refused("rehearse", "--plan", str(large_plan))
    assert done.returncode == 2
    assert "model of your own" in done.stderr
    assert "Traceback" not in done.stderr
