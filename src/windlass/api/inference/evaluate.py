"""`evaluate` asks a trained model the questions of tasks, and says how well it answers them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.inference.language_model import (
    LanguageModel,
    find_language_model,
    load_language_model,
    streamed_language_model,
)
from windlass.api.machines import Progress
from windlass.api.runs import RUNS
from windlass.errors import RequestError
from windlass.schema import EVALUATIONS_FOLDER, TaskScore
from windlass.tracking import require_no_links

if TYPE_CHECKING:
    from windlass.api.inference.evaluate_on_ranks import RanksModel
    from windlass.data import EncodedTask, Task


def evaluate(
    run: str | Path,
    *tasks: "Task | Path | str",
    shots: int | None = None,
    step: int | None = None,
    phases: int = 1,
    overrides: Sequence[str] = (),
    ema: bool = False,
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
        overrides: `key=value` of a plan, such as `parallel.pipeline=2`, whose ranks score together
            on this host; none let one process score. Scores are the same but for rounding.
        ema: whether averages of the weights that the run keeps (`train.ema`) are scored.
        root: the folder that holds the run folders.
        progress: called with how many tasks are done.

    Returns:
        A score for each task, in their order; `metrics` has its numbers.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: no task is named, one cannot be read, or the model has no tokenizer or does
            not predict the next token; or an override is none of a plan's.
        InputErrors: lines of a task that are none, or choices that are too long for the model.
        CheckpointError: it has no such checkpoint, none that is whole, or no averages for `ema`.
        StorageError: the folder cannot be written.
        WindlassError: there is no such plan, or a rank failed.
    """
    from windlass.data import load_task

    if not tasks:
        raise RequestError("no task is named; name the TOML file of one")
    asked = [load_task(Path(task)) if isinstance(task, str | Path) else task for task in tasks]
    asked = asked if shots is None else [task.with_shots(shots) for task in asked]
    scores: list[TaskScore] = []
    with _answering(
        run, overrides, step=step, phases=phases, ema=ema, root=root, progress=progress
    ) as model:
        require_no_links(model.folder)
        encoded = [_encode(model, task) for task in asked]
        # Ranks start anew each time that they are asked.
        parts = [encoded] if overrides else [[each] for each in encoded]
        for part in parts:
            if progress is not None:
                progress("evaluating", len(scores), len(asked))
            scores += _scores(model, part)
        scores = [score.model_copy(update={"ema": ema}) for score in scores]
        for score in scores:
            label = f"step-{model.step:08d}{'-ema' if ema else ''}"
            name = f"{label}.{score.task}.{score.shots}-shot.json"
            score.save(model.folder / EVALUATIONS_FOLDER / name)
    return tuple(scores)


@contextmanager
def _answering(
    run: str | Path,
    overrides: Sequence[str],
    *,
    step: int | None,
    phases: int,
    ema: bool,
    root: Path | str,
    progress: Progress | None,
) -> "Iterator[LanguageModel | RanksModel]":
    """The model that answers: in this process, or on the ranks of a plan if one is named."""
    if not overrides:
        with streamed_language_model(run, step=step, root=root, phases=phases, ema=ema) as model:
            yield model
        return
    from windlass.api.inference.evaluate_on_ranks import plan_ranks

    if phases != 1:
        raise RequestError(
            f"`phases` = {phases} is of one process, and {overrides[0]} of several; leave one out"
        )
    record, _, checkpoint = find_language_model(run, step=step, root=root)
    yield plan_ranks(record, checkpoint, overrides, ema=ema, progress=progress)


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
    (made,) = _scores(model, [_encode(model, asked)])
    return made


def _encode(model: "LanguageModel | RanksModel", task: "Task") -> "EncodedTask":
    from windlass.data import encode_task

    return encode_task(task, model.tokenizer, model.max_sequence)


def _scores(
    model: "LanguageModel | RanksModel", tasks: "Sequence[EncodedTask]"
) -> Iterator[TaskScore]:
    """The score of each task, whose questions the model answers at once."""
    from windlass.data import score_choices

    flat = [choice for task in tasks for choices in task.choices for choice in choices]
    values = iter(model.log_likelihoods(flat))
    for task, questions in tasks:
        answers = [[next(values) for _ in choices] for choices in questions]
        yield score_choices(task, answers, step=model.step)
