"""`evaluate` asks a trained model the questions of tasks, and says how well it answers them."""

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.inference.language_model import (
    LanguageModel,
    load_language_model,
    streamed_language_model,
)
from windlass.api.machines import Progress
from windlass.api.runs import RUNS
from windlass.errors import RequestError
from windlass.schema import EVALUATIONS_FOLDER, TaskScore

if TYPE_CHECKING:
    from windlass.data import EncodedTask, Task


def evaluate(
    run: str | Path,
    *tasks: "Task | Path | str",
    shots: int | None = None,
    step: int | None = None,
    phases: int = 1,
    root: Path | str = RUNS,
    progress: Progress | None = None,
) -> tuple[TaskScore, ...]:
    """How well a run's model answers some tasks; the scores are kept in the run's folder.

    Likelihoods are the model's own, in float32.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        tasks: tasks, or their TOML files.
        shots: solved questions before each question; None means as many as a task says.
        step: step of the checkpoint; None means the newest good one.
        phases: groups of layers that take turns in memory, for a model that is too large for it;
            1 keeps all layers. Scores are the same.
        root: the folder that holds the run folders.
        progress: called with how many tasks are done.

    Returns:
        A score for each task, in their order; `metrics` has its numbers.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: no task is named, one cannot be read, or the model has no tokenizer or does
            not predict the next token.
        InputErrors: lines of a task that are none, or choices that are too long for the model.
        CheckpointError: it has no such checkpoint, or none that is whole.
        StorageError: the folder cannot be written.
    """
    from windlass.data import load_task

    if not tasks:
        raise RequestError("no task is named; name the TOML file of one")
    asked = [load_task(Path(task)) if isinstance(task, str | Path) else task for task in tasks]
    asked = asked if shots is None else [task.with_shots(shots) for task in asked]
    scores = []
    with streamed_language_model(run, step=step, root=root, phases=phases) as model:
        encoded = [_encode(model, task) for task in asked]
        for number, task in enumerate(asked):
            if progress is not None:
                progress("evaluating", number, len(asked))
            scores.append(_score(model, encoded[number]))
            name = f"step-{model.step:08d}.{task.name}.{task.shots}-shot.json"
            scores[-1].save(model.folder / EVALUATIONS_FOLDER / name)
    return tuple(scores)


def score(
    run: str | Path,
    task: "Task | Path | str",
    *,
    shots: int | None = None,
    step: int | None = None,
    root: Path | str = RUNS,
) -> TaskScore:
    """How well a run's model answers one task; `evaluate` takes several, and keeps the scores.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        task: a task, or its TOML file.
        shots: solved questions before each question; None means as many as the task says.
        step: step of the checkpoint; None means the newest good one.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: its model does not predict the next token, it has no tokenizer, or the task
            cannot be read.
        InputErrors: lines of the task that are none, or choices that are too long for the model.
        CheckpointError: it has no such checkpoint, or none that is whole.
    """
    from windlass.data import load_task

    asked = load_task(Path(task)) if isinstance(task, str | Path) else task
    asked = asked if shots is None else asked.with_shots(shots)
    model = load_language_model(run, step=step, root=root)
    return _score(model, _encode(model, asked))


def _encode(model: LanguageModel, task: "Task") -> "EncodedTask":
    from windlass.data import encode_task

    return encode_task(task, model.tokenizer, model.max_sequence)


def _score(model: LanguageModel, encoded: "EncodedTask") -> TaskScore:
    from windlass.data import score_choices

    flat = [choice for choices in encoded.choices for choice in choices]
    values = iter(model.log_likelihoods(flat))
    answers = [[next(values) for _ in choices] for choices in encoded.choices]
    return score_choices(encoded.task, answers, step=model.step)
