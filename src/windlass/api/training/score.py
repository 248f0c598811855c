"""`score` asks a trained model the questions of a task, and says how many it answers rightly."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from windlass.api.objects import NO_OBJECTS
from windlass.api.runs import RUNS, load
from windlass.api.training.legs import request_at_step
from windlass.api.training.run_files import planned_from_record, require_unchanged
from windlass.errors import CheckpointError, InputErrors, RequestError
from windlass.models import is_causal
from windlass.schema import CHECKPOINT_FOLDER, MERGED_CHECKPOINT_FOLDER, TOKENIZER_FILE
from windlass.tracking import RunRecord

if TYPE_CHECKING:
    from windlass.data import EncodedChoice, Task, TaskScore
    from windlass.runtime import Checkpoint

_MAX_MESSAGES = 5


def score(
    run: str | Path,
    task: "Task | Path | str",
    *,
    shots: int | None = None,
    step: int | None = None,
    root: Path | str = RUNS,
) -> "TaskScore":
    """How well a run's model answers a task: accuracy, also per character, and bits per byte.

    The likelihood of each choice is the model's own, in float32; the likeliest one is its answer.

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
    from windlass.data import encode_choices, load_task, load_tokenizer, score_choices
    from windlass.runtime import log_likelihoods, merge_shards

    asked = load_task(Path(task)) if isinstance(task, str | Path) else task
    asked = asked if shots is None else asked.with_shots(shots)
    record = load(run, root=root)
    planned = planned_from_record(record)
    require_unchanged(record, TOKENIZER_FILE)
    _require_language_model(record, planned.request.model.name)
    checkpoint = _checkpoint(record, step)
    # Another leg of the run had layers of other shapes.
    request = request_at_step(planned.request, checkpoint.manifest.step)
    stack = NO_OBJECTS.stack(request.model_identity, seed=None)
    encoded = encode_choices(asked, load_tokenizer(record.folder / TOKENIZER_FILE))
    _require_short(asked, encoded, stack.max_sequence)
    with TemporaryDirectory(dir=record.folder) as folder:
        merged = merge_shards(checkpoint, stack, Path(folder) / MERGED_CHECKPOINT_FOLDER)
        flat = [choice for choices in encoded for choice in choices]
        values = iter(log_likelihoods(stack, merged, flat))
    return score_choices(asked, [[next(values) for _ in choices] for choices in encoded])


def _require_language_model(record: RunRecord, model: str) -> None:
    """Refuses a run whose model cannot say how likely a text is.

    Raises:
        RequestError: it predicts masked tokens, was given as an object, or has no tokenizer.
    """
    run = f"run `{record.folder.name}`"
    if not is_causal(model):
        raise RequestError(
            f"`{model}` predicts masked tokens, not the next one; score a run of a causal model"
        )
    if record.meta.get("objects"):
        raise RequestError(
            f"{run} was given its model as an object, which no file holds, so that it cannot be "
            "scored; put the function that builds it into a file that is imported"
        )
    if not (record.folder / TOKENIZER_FILE).is_file():
        raise RequestError(
            f"{run} was trained on token ids and has no tokenizer, so that it cannot read a task"
        )


def _checkpoint(record: RunRecord, step: int | None) -> "Checkpoint":
    from windlass.runtime import Checkpoint, checkpoint_name, latest_checkpoint, verify_checkpoint

    folder = record.folder / CHECKPOINT_FOLDER
    if step is None:
        newest = latest_checkpoint(folder)
        if newest is None:
            raise CheckpointError(f"run `{record.folder.name}` has saved no checkpoint yet")
        return newest
    path = folder / checkpoint_name(step)
    if not path.is_dir():
        raise CheckpointError(f"run `{record.folder.name}` keeps no checkpoint of step {step}")
    return Checkpoint(path=path, manifest=verify_checkpoint(path))


def _require_short(task: "Task", encoded: "list[list[EncodedChoice]]", longest: int | None) -> None:
    """Refuses choices that are longer than what a model reads.

    Raises:
        InputErrors: the first of them.
    """
    messages = [
        f"question {number} of task `{task.name}` has a choice of {len(choice.tokens)} tokens, and "
        f"the model reads {longest}; leave it out"
        for number, choices in enumerate(encoded, start=1)
        for choice in choices
        if longest is not None and len(choice.tokens) > longest
    ]
    if messages:
        raise InputErrors(messages[:_MAX_MESSAGES])
