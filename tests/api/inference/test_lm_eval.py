"""Scores beside those of lm-evaluation-harness's own model, on the folder that a run exports."""

import warnings
from pathlib import Path
from typing import Any

import pytest

import windlass
from command_line import TINY
from hub_folders import chat_model_folder
from task_files import all_tasks, task_file
from windlass.schema import TaskScore

ROUNDING_OF_GEMMA = 2e-6
"""Relative error of Gemma 2's scores: attention scales queries here, and scores in transformers."""


def of_harness(folder: Path, tasks: list[Path], *, chat: bool) -> dict[str, dict[str, Any]]:
    """The results of the harness's own `hf` model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval
        from lm_eval.tasks import TaskManager

        return lm_eval.simple_evaluate(
            model="hf", model_args=f"pretrained={folder},dtype=float32", device="cpu",
            tasks=list(map(str, tasks)), task_manager=TaskManager(include_defaults=False),
            apply_chat_template=chat, system_instruction="Count." if chat else None,
        )["results"]  # fmt: skip


def require_equal(
    scores: tuple[TaskScore, ...], expected: dict[str, dict[str, Any]], within: float = 0.0
) -> None:
    """Every digit of a score is the harness's, or all but a rounding."""
    assert [score.task for score in scores] == list(expected)
    for score in scores:
        assert score.metrics
        for metric in score.metrics:
            name, _, of_filter = metric.name.partition(".")
            key = f"{name}{{}},{of_filter or 'none'}"
            theirs = expected[score.task]
            assert metric.value == pytest.approx(theirs[key.format("")], rel=within, abs=0)
            error = theirs[key.format("_stderr")]
            assert metric.standard_error == (
                None if isinstance(error, str) else pytest.approx(error, rel=1e-3)
            )


@pytest.mark.parametrize(
    ("family", "chat"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma2", False, marks=pytest.mark.slow),
        pytest.param("gemma2", True, marks=pytest.mark.slow),
        pytest.param("qwen2", False, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
        pytest.param("olmo2", False, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_harness_for_each_familys_folder(
    family: str, chat: bool, home: Path
) -> None:
    folder = chat_model_folder(home / "model", family)
    run = windlass.import_model(folder, root=home / "runs")
    tasks = all_tasks(home / "tasks")
    tasks = tasks[:2] if chat else tasks
    writes = task_file(
        home / "tasks", "writes", [{"context": "3 times", "target": "x"}] * 2,
        output_type="generate_until", metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"max_gen_toks": 8, "until": ["\n"]},
    )  # fmt: skip

    scores = windlass.evaluate(run, *tasks, writes, chat=chat, system="Count." if chat else None)

    within = ROUNDING_OF_GEMMA if family == "gemma2" else 0.0
    require_equal(scores, of_harness(folder, [*tasks, writes], chat=chat), within)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bytes", "pieces", "pipeline", "rotary"])
def test_scores_of_our_own_models_are_those_of_the_folder_that_they_export(
    model: str, home: Path
) -> None:
    words = {
        "bytes": TINY,
        "pieces": (*TINY, "data.tokenizer=bpe", "data.vocabulary=300", "model.vocabulary=300"),
        "pipeline": (*TINY, "model.layers=4", "parallel.pipeline=2"),
        "rotary": ("llama-tiny", *TINY[1:], "model.kv_heads=1", "model.ffn=64"),
    }[model]
    run = windlass.train(
        *words, f"data.source={home / 'text'}", "train.steps=40", root=home / "runs"
    )
    list(run)
    windlass.export(run.folder, to=f"hf:{home / 'out'}")
    tasks = all_tasks(home / "tasks")

    scores = windlass.evaluate(run.folder, *tasks, phases=4 if model == "pipeline" else 1)

    require_equal(scores, of_harness(home / "out", tasks, chat=False))
