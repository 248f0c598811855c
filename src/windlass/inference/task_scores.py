"""`evaluate` scores a trained model on tasks, by lm-evaluation-harness."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import RenderableType

from windlass.answer import Answers, word_table
from windlass.atomic_files import scratch_folder
from windlass.errors import RequestError
from windlass.flags import Flag, RunsFolder, Watch, Word
from windlass.inference.language_model import (
    LanguageModel,
    find_language_model,
    open_language_model,
)
from windlass.jobs import NO_OBJECTS, RUNS, Planned, Progress, write_small_files
from windlass.schema import EVALUATIONS_FOLDER, TOKENIZER_FILE, TaskScore
from windlass.tracking import RunRecord, require_no_links
from windlass.training import request_at_step

if TYPE_CHECKING:
    from windlass.inference.evaluate_on_ranks import RanksModel
    from windlass.runtime import Checkpoint

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=(?!.*\.ya?ml$)")
"""A key and a value, which the name of a YAML file is not."""


class Scores(Answers[TaskScore]):
    """A score for each task and group of tasks; `metrics` has its numbers."""

    def lines(self) -> Iterator[RenderableType]:
        """A row for each metric, to four digits behind the point."""
        rows: list[tuple[str, ...]] = []
        for score in self:
            words = [str(score.step or ""), *["(EMA)"] * score.ema, *["(chat)"] * score.chat]
            first = (" ".join(words), score.task, str(score.shots))
            for metric in score.metrics:
                error = metric.standard_error
                spread = f"± {error:.4f}" if error is not None else ""
                rows.append((*first, metric.name, f"{metric.value:.4f}", spread))
                first = ("", "", "")
        yield word_table(("step", "task", "n-shot", "metric", "value", "stderr"), rows)


def evaluate(
    run: Annotated[str | Path, Word],
    *words: Annotated[str | Path, Word],
    tasks: str = "",
    step: int | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: Flag = False,
    system: str | None = None,
    phases: int = 1,
    ema: Flag = False,
    overrides: Annotated[Sequence[str], Parameter(parse=False)] = (),
    root: RunsFolder = RUNS,
    progress: Watch = None,
) -> Scores:
    """Score a trained model on tasks, by lm-evaluation-harness.

    Tasks, prompts and metrics are the harness's own; likelihoods are the model's, in float32. The
    scores are kept in the run's folder.

    For example: `windlass evaluate last --tasks hellaswag,capitals.yaml parallel.pipeline=2`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        words: Tasks, as for `--tasks`; and `key=value` of a plan, such as `parallel.pipeline=2`,
            whose ranks answer together on this host.
        tasks: Names in the library of lm-evaluation-harness or YAML files of its form, divided by
            commas.
        step: Step of the checkpoint; the newest good one if not given.
        shots: Solved questions before each question; as many as each task says if not given.
        limit: Most questions of each task; all if not given.
        chat: Ask in the model's chat template.
        system: With `--chat`, the system prompt.
        phases: Groups of layers that take turns in memory, for a model that is too large for it.
        ema: Score the averages of the weights that the run keeps (`train.ema`).
        overrides: `key=value` of a plan, as among `words`. Scores are the same but for rounding.
        root: The folder that holds the run folders.
        progress: Called with what is under way.

    Returns:
        A score for each task and group of tasks; `metrics` has its numbers.

    Raises:
        RecordError: no such run, or one of its files has changed.
        RequestError: the harness is not installed, no task is named or one cannot be read, or the
            model has no tokenizer or does not predict the next token; or an override is none of a
            plan's.
        CheckpointError: it has no such checkpoint, none that is whole, or no averages for `ema`.
        StorageError: the folder cannot be written.
        WindlassError: there is no such plan, or a rank failed.
    """
    more = [str(word) for word in words if _OVERRIDE.match(str(word))]
    names = [*(word for word in words if str(word) not in more), *([tasks] if tasks else ())]
    record, planned, checkpoint = find_language_model(run, step=step, root=root)
    require_no_links(record.folder)
    with _answering(
        record, planned, checkpoint, (*overrides, *more), phases=phases, ema=ema, progress=progress
    ) as model:
        scores = _scores(
            model, planned, names, shots=shots, limit=limit, chat=chat, system=system,
            progress=progress,
        )  # fmt: skip
    scores = Scores(score.model_copy(update={"ema": ema}) for score in scores)
    for score in scores:
        label = f"step-{score.step:08d}{'-ema' if ema else ''}{'-chat' if chat else ''}"
        name = f"{label}.{score.task.replace('/', '_')}.{score.shots}-shot.json"
        score.save(record.folder / EVALUATIONS_FOLDER / name)
    return scores


def _scores(
    model: "LanguageModel | RanksModel",
    planned: Planned,
    tasks: Sequence[str | Path],
    *,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    system: str | None = None,
    progress: Progress | None = None,
) -> tuple[TaskScore, ...]:
    from windlass.integrations import Harness, task_names

    names = task_names([str(task) for task in tasks])
    if not names:
        raise RequestError(
            "no task is named; name one of lm-evaluation-harness (`--tasks hellaswag`), or a YAML "
            "file of its form"
        )
    if system is not None and not chat:
        raise RequestError("a system prompt belongs to a chat template; ask in it by `--chat`")
    if progress is not None:
        progress("reading tasks", 0, None)
    identity = request_at_step(planned.request, model.step).model_identity
    with scratch_folder(model.folder) as folder:
        write_small_files(identity, model.folder / TOKENIZER_FILE, folder)
        harness = Harness(names, folder, shots=shots, limit=limit, chat=chat, system=system)
        if progress is not None:
            progress("evaluating", 0, None)
        return harness.scores(model, step=model.step)


@contextmanager
def _answering(
    record: RunRecord,
    planned: Planned,
    checkpoint: "Checkpoint",
    overrides: Sequence[str],
    *,
    phases: int,
    ema: bool,
    progress: Progress | None,
) -> "Iterator[LanguageModel | RanksModel]":
    """The model that answers: in this process, or on the ranks of a plan if one is named."""
    if not overrides:
        with open_language_model(
            record, planned, checkpoint, NO_OBJECTS, phases=phases, ema=ema
        ) as model:
            yield model
        return
    from windlass.inference.evaluate_on_ranks import plan_ranks

    if phases != 1:
        raise RequestError(
            f"`phases` = {phases} is of one process, and {overrides[0]} of several; leave one out"
        )
    yield plan_ranks(record, checkpoint, overrides, ema=ema, progress=progress)


def score(
    run: str | Path,
    task: str | Path,
    *,
    shots: int | None = None,
    step: int | None = None,
    root: Path | str = RUNS,
) -> TaskScore:
    """How well a run's model answers one task; `evaluate` takes several, and keeps the scores.

    Args:
        run: folder, name, the first characters of its id, or `last`.
        task: a name in the library of lm-evaluation-harness, or a YAML file of its form.
        shots: solved questions before each question; None means as many as the task says.
        step: step of the checkpoint; None means the newest good one.
        root: the folder that holds the run folders.

    Raises:
        WindlassError: as `evaluate`.
    """
    record, planned, checkpoint = find_language_model(run, step=step, root=root)
    with open_language_model(record, planned, checkpoint, NO_OBJECTS) as model:
        return _scores(model, planned, [task], shots=shots)[0]
