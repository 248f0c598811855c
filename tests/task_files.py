"""Tasks as files of lm-evaluation-harness, over JSON lines beside them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def task_file(
    folder: Path, name: str, rows: Sequence[Mapping[str, object]], **fields: object
) -> Path:
    """Writes a task whose rows have a `context` and `choices`, a `target`, or a `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "choices" in rows[0]:
        own = {"output_type": "multiple_choice", "doc_to_text": "{{context}}",
               "doc_to_choice": "choices", "doc_to_target": "answer",
               "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}  # fmt: skip
    elif "text" in rows[0]:
        own = {"output_type": "loglikelihood_rolling", "doc_to_text": "",
               "doc_to_target": "{{text}}",
               "metric_list": [{"metric": name}
                               for name in ("bits_per_byte", "byte_perplexity")]}  # fmt: skip
    else:
        own = {"output_type": "loglikelihood", "doc_to_text": "{{context}}",
               "doc_to_target": "{{target}}",
               "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]}  # fmt: skip
    task = {"task": name, "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(data)}}, **own, **fields}  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(task))
    return path


SUMS = [
    {"context": f"{n} times {n} is", "choices": [f"{n * n}", f"{n + 3}é"], "answer": 0}
    for n in range(4, 12)
]
TARGETS = [{"context": f"{n} times {n}", "target": "s" if n % 3 else "is"} for n in range(6)]
TEXTS = [{"text": f"{n} times {n} is {n * n}\n" * (n + 1)} for n in range(4)]


def all_tasks(folder: Path) -> list[Path]:
    """A task of choices with a solved question, one of targets and one of whole texts."""
    shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": 1}
    return [
        task_file(folder, "sums", SUMS, **shots),
        task_file(folder, "targets", TARGETS),
        task_file(folder, "texts", TEXTS),
    ]
