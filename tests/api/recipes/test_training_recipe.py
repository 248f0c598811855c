"""Recipes of trainings: what their files say, what follows from a depth, and that they run on."""

import json
from pathlib import Path

import pytest

import windlass
from windlass.errors import InputErrors, RequestError
from windlass.experiments.recipes.run_training_recipe import plan_training, run_training
from windlass.experiments.recipes.training_recipe import (
    depth_settings,
    training_plan,
    training_recipes,
)
from windlass.jobs.model_graph import capture

SMALL = (
    "train.steps=2", "train.batch=2", "train.sequence=16", "train.evaluate_sequences=2",
    "model.width=32", "model.heads=2", "data.limit_bytes=1MB", "data.held_out=0.2",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(training_recipes()))
@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_each_recipe_is_made_of_valid_requests(name: str, scale: str) -> None:
    plan = training_plan(name, scale=scale)

    for part in plan.parts:
        assert plan.request(part).train.steps
    assert training_recipes()[name].notes
    assert (plan.target is not None) == (scale == "tiny")


def test_bert_large_has_the_published_phases() -> None:
    plan = training_plan("bert-large", scale="full")
    phases = [plan.request(part).train for part in plan.parts]

    assert [(one.sequence, one.steps) for one in phases] == [(128, 7038), (512, 2137)]
    assert [one.learning_rate for one in phases] == [0.006, 0.002828]
    # Micro-batches of 8 and 2, 4 replicas and 2,040 accumulations are the published ones.
    assert [one.batch for one in phases] == [8 * 4 * 2040, 2 * 4 * 2040]
    assert {one.optimizer for one in phases} == {"lamb"}
    assert plan.parts[1].parent == plan.parts[0].name


def test_twelve_layers_are_the_smallest_gpt_2() -> None:
    given = depth_settings(12, tokens_per_weight=20, vocabulary=50257, sequence=1024)
    sizes = {key.removeprefix("model."): value for key, value in given.items() if "model" in key}

    assert sizes == {"layers": 12, "width": 768, "heads": 12}
    tokens = given["train.steps"] * given["train.batch"] * 1024
    assert tokens == pytest.approx(20 * 124_439_808, rel=0.01)


def test_a_deeper_gpt_takes_larger_batches_and_a_lower_rate() -> None:
    few, many = (
        depth_settings(depth, tokens_per_weight=20, vocabulary=50257, sequence=1024)
        for depth in (6, 24)
    )

    assert few["train.batch"] < many["train.batch"]
    assert few["train.learning_rate"] > many["train.learning_rate"]


def test_a_run_smaller_than_any_that_the_law_was_fitted_to_takes_the_rate_of_the_smallest() -> None:
    few, more = (
        depth_settings(depth, tokens_per_weight=4, vocabulary=1024, sequence=128)
        for depth in (2, 4)
    )

    assert few["train.learning_rate"] == more["train.learning_rate"]
    # Section 3.1 of the paper: 0.3118 (1e17)^-0.125.
    assert few["train.learning_rate"] == pytest.approx(0.3118 / 10 ** (17 / 8), rel=0.01)


def test_a_dial_or_an_override_leaves_no_target_that_was_measured_without_it() -> None:
    assert training_plan("gpt-depth=2").target is not None
    assert training_plan("gpt-depth=3").target is None
    assert training_plan("llama", "train.steps=10").target is None


def test_an_override_counts_in_each_part() -> None:
    plan = training_plan("bert-large", "train.batch=8")

    assert [plan.request(part).train.batch for part in plan.parts] == [8, 8]


@pytest.mark.parametrize(
    ("name", "scale", "reason"),
    [
        ("lama", "tiny", "did you mean `llama`?"),
        ("llama", "large", "it has `full` and `tiny`"),
        ("llama=3", "tiny", "has no dial; leave out `=3`"),
        ("gpt-depth=deep", "tiny", "a number of layers from 1 to 512"),
        ("gpt-depth=", "tiny", "a number of layers from 1 to 512"),
    ],
)
def test_what_is_no_recipe_scale_or_dial_is_refused(name: str, scale: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason.replace("?", r"\?")):
        training_plan(name, scale=scale)


def test_a_mixture_at_full_size_has_the_parameters_that_were_published() -> None:
    plan = training_plan("moe", scale="full")
    request = plan.request(plan.parts[0])
    count = capture(request.model_identity).parameter_count

    # Muennighoff et al. 2024, table 1: 6.9 B, of which a token uses 1.3 B.
    assert count == pytest.approx(6.9e9, rel=0.01)
    unused = 16 * (64 - 8) * 3 * 2048 * 1024
    assert count - unused == pytest.approx(1.3e9, rel=0.02)
    # 1,024 sequences of 4,096 tokens, and 8,388,608,000 tokens of warm-up.
    warm_up = request.train.warmup * request.train.steps * 1024 * 4096
    assert warm_up == pytest.approx(8_388_608_000, rel=0.001)


def test_weights_that_only_a_user_has_are_asked_for_before_anything_runs(tmp_path: Path) -> None:
    plan = training_plan("chat-lora", scale="full")

    with pytest.raises(RequestError, match="name their folder"):
        run_training(plan, tmp_path / "chat")
    assert not (tmp_path / "chat").exists()


@pytest.mark.slow
def test_adapters_are_trained_beside_the_exported_base_and_both_are_scored(tmp_path: Path) -> None:
    small = ("train.steps=2", "train.batch=2", "train.sequence=64", "train.evaluate_sequences=2")
    plan, folder = training_plan("chat-lora", *small), tmp_path / "chat"

    result = run_training(plan, folder)

    base, tuned = result.parts
    model = windlass.load(tuned.folder).request.model.name
    assert model == f"hf:{(folder / 'seed-1-pretraining-hf').absolute()}"
    for part in result.parts:
        (score,) = windlass.load(part.folder).evaluations
        assert (score.task, part.accuracy) == ("library-names", score.metric("acc"))
    adapters = [path for path in tuned.folder.glob("checkpoints/*/layer-*") if path.is_file()]
    assert adapters
    assert tuned.first_loss != base.first_loss
    assert run_training(plan, folder) == result


@pytest.mark.slow
def test_a_phase_starts_from_the_one_before_and_nothing_runs_twice(tmp_path: Path) -> None:
    plan, folder = training_plan("bert-large", *SMALL), tmp_path / "bert"
    seen: list[str] = []

    def observe(run: str, _: object) -> None:
        seen.append(run)

    first = run_training(plan, folder, observe=observe)

    assert seen == ["seed-1-phase-1"] * 2 + ["seed-1-phase-2"] * 2
    assert windlass.load(first.parts[1].folder).meta["parent"]["name"] == "seed-1-phase-1"
    assert "no target" in first.verdict
    assert run_training(plan, folder, observe=observe) == first
    assert len(seen) == 4
    with pytest.raises(InputErrors, match="name another folder"):
        run_training(training_plan("llama"), folder)


@pytest.mark.slow
def test_the_packing_factor_is_known_before_training(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": "one or two words " * (1 + n % 3)}) for n in range(60)]
    path.write_text("\n".join(lines), encoding="utf-8")
    text = (f"data.source={path}", "data.tokenizer=byte", "data.packing=true", "compile=false")
    plan = training_plan("bert-large", *SMALL, "train.sequence=64", *text)

    for part in plan_training(plan):
        note = part.notes[-1]
        documents, rows = (int(note.split(word)[0].split()[-1]) for word in (" training", " rows"))
        assert note.startswith(f"packing factor {documents / rows:.2f}: ")
        assert documents > rows
