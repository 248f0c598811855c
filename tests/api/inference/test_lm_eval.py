"""Scores beside those of lm-evaluation-harness, the field's own program for them."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.data import TargetItem, Task, TaskItem, TextItem, save_task

MODELS = {
    "bytes": TINY,
    "pieces": (*TINY, "data.tokenizer=bpe", "data.vocabulary=300", "model.vocabulary=300"),
    "pipeline": (*TINY, "model.layers=4", "parallel.pipeline=2"),
    "rotary": ("llama-tiny", *TINY[1:], "model.kv_heads=1", "model.ffn=64"),
}
CHOICES = tuple(
    TaskItem(context=f"{n} times {n} is", choices=(str(n * n), f"{n + 3}é"), answer=0)
    for n in range(4, 12)
)
TARGETS = tuple(
    TargetItem(context=f"{n} times {n}", target="s" if n % 3 else "is") for n in range(6)
)
TEXTS = tuple(TextItem(text=f"{n} times {n} is {n * n}\n" * (n + 1)) for n in range(4))
TASKS = (
    Task(name="choices", items=CHOICES, examples=CHOICES[:2], shots=1, target_delimiter=" "),
    Task(name="targets", items=TARGETS, output_type="loglikelihood"),
    Task(name="texts", items=TEXTS, output_type="loglikelihood_rolling"),
)
METRICS = {
    "choices": ("acc", "acc_norm"),
    "targets": ("acc", "perplexity"),
    "texts": ("bits_per_byte", "byte_perplexity", "word_perplexity"),
}


def of_harness(task: Task, folder: Path) -> dict[str, object]:
    """The same task as the harness is told of it."""
    files = {"test": str(folder / f"{task.name}.items.jsonl")}
    if task.examples:
        files["train"] = str(folder / f"{task.name}.examples.jsonl")
    fields: Mapping[str, str] = {
        "multiple_choice": {"doc_to_text": "context", "doc_to_choice": "choices",
                            "doc_to_target": "answer"},
        "loglikelihood": {"doc_to_text": "context", "doc_to_target": "target"},
        "loglikelihood_rolling": {"doc_to_text": "", "doc_to_target": "text"},
    }[task.output_type]  # fmt: skip
    return {
        "task": task.name, "dataset_path": "json", "dataset_kwargs": {"data_files": files},
        "test_split": "test", "output_type": task.output_type, "num_fewshot": task.shots,
        "target_delimiter": task.target_delimiter, "fewshot_delimiter": task.separator,
        "metric_list": [{"metric": name} for name in METRICS[task.name]], **fields,
    } | ({"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
         if task.examples else {})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_scores_are_those_of_the_evaluation_harness_to_every_printed_digit(
    model: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    words = (*MODELS[model], f"data.source={home / 'text'}", "train.steps=40")
    run = windlass.train(*words, root=home / "runs")
    list(run)
    files = [save_task(task, home / "tasks") for task in TASKS]

    scores = windlass.evaluate(run.folder, *files, phases=4 if model == "pipeline" else 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval
        from lm_eval.tasks import TaskManager

        from windlass.integrations.lm_eval import WindlassLM

        results = lm_eval.simple_evaluate(
            model=WindlassLM(windlass.load_language_model(run.folder)),
            tasks=[of_harness(task, home / "tasks") for task in TASKS],
            task_manager=TaskManager(include_defaults=False),
        )["results"]
    for score in scores:
        for metric in score.metrics:
            if metric.name in METRICS[score.task]:
                expected = results[score.task]
                key = f"{metric.name}{{}},none"
                assert printed(metric.value) == printed(expected[key.format("")])
                assert printed(metric.standard_error) == printed(expected[key.format("_stderr")])


def printed(value: float | str | None) -> str:
    """A number with the digits of the harness's table."""
    return f"{value:.4f}" if isinstance(value, float) else "N/A"
