"""Plans and runs a training recipe: part after part, each from where the one before ended."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.errors import InputErrors, RecordError, RequestError
from windlass.experiments.recipes.training_recipe import (
    CONVERSATIONS,
    RecipePart,
    RecipeTarget,
    TrainingPlan,
)
from windlass.inference import evaluate
from windlass.jobs import HERE, NO_OBJECTS, Planned, Progress, load, plan_request, prepare_data
from windlass.planner import Findings
from windlass.schema import EVALUATIONS_FOLDER, Request, Step, TaskScore
from windlass.training import (
    Run,
    data_notes,
    export,
    find_parent,
    make_batches,
    resume,
    train,
    with_document_lengths,
)

_PLAN_FILE = "recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """A part of a training recipe that has run; losses are in nats a token or an image."""

    seed: int
    part: str
    folder: Path
    steps: int
    seconds: float
    """Measured time of the steps."""
    first_loss: float
    """Training loss of the first step."""
    held_out_loss: float | None
    """Loss of held-out tokens or images after the last step; None if it was not evaluated."""
    accuracy: float | None = None
    """Share of the recipe's questions that it answers right, or of held-out images or pairs of
    sentences whose class is; None if it has none of these."""

    @property
    def measures(self) -> str:
        """What the target is about, as it was measured."""
        nan = float("nan")
        loss = f"held-out loss {nan if self.held_out_loss is None else self.held_out_loss:.4f}"
        return loss if self.accuracy is None else f"{loss} and accuracy {self.accuracy:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """A training recipe that has run."""

    plan: TrainingPlan
    parts: tuple[PartResult, ...]
    """In the order in which they ran: all parts with the first seed, then all with the next."""

    @property
    def missed(self) -> tuple[PartResult, ...]:
        """The last parts of those seeds that did not reach the target."""
        return tuple(part for part in self._last if not _reaches(part, self.plan.target))

    @property
    def verdict(self) -> str:
        """Whether the target was reached, in a sentence without a full stop."""
        if self.plan.target is None:
            return "the recipe has no target at this size and with these settings"
        reached = len(self._last) - len(self.missed)
        measured = "; ".join(part.measures for part in self._last)
        return (
            f"{measured}; the target, {self.plan.target}, is reached with {reached} of "
            f"{len(self._last)} seeds"
        )

    @property
    def _last(self) -> tuple[PartResult, ...]:
        name = self.plan.parts[-1].name
        return tuple(part for part in self.parts if part.part == name)


def _reaches(part: PartResult, target: RecipeTarget | None) -> bool:
    if target is None:
        return True
    loss, accuracy = part.held_out_loss, part.accuracy
    is_low = target.held_out_loss is None or (loss is not None and loss <= target.held_out_loss)
    is_right = target.accuracy is None or (accuracy is not None and accuracy >= target.accuracy)
    return is_low and is_right


def plan_training(
    plan: TrainingPlan, *, machine: str = HERE, progress: Progress | None = None
) -> tuple[Planned, ...]:
    """The plan of each part of a training recipe on a machine, with predicted times; none is run.

    Where rows are packed the text is read, for the number of sequences that share a row.

    Args:
        plan: what the recipe runs.
        machine: a name of the catalogue.
        progress: called with how far planning is.

    Raises:
        WindlassError: what is wrong with a request or the machine.
    """
    findings, every = Findings(), []
    for part in plan.parts:
        request = plan.request(part).model_copy(update={"machine": machine})
        planned = plan_request(request, NO_OBJECTS, progress, explains=False, findings=findings)
        if planned.result.plan is None:  # What would help is said.
            planned = plan_request(request, NO_OBJECTS, progress, findings=findings)
        every.append(_with_packing(planned, progress))
    return tuple(every)


def _with_packing(planned: Planned, progress: Progress | None) -> Planned:
    """The plan, which says how many sequences share a row; that is counted from its text."""
    data = planned.request.data
    # Conversations of a recipe's own are made when it runs.
    if not data.packing or data.source == CONVERSATIONS or planned.result.plan is None:
        return planned
    batches = make_batches(planned, prepare_data(planned.request, progress))
    planned = with_document_lengths(planned, batches)
    return replace(planned, notes=(*planned.notes, *data_notes(batches)))


def run_training(
    plan: TrainingPlan,
    folder: Path | str,
    *,
    seeds: int = 1,
    stop: Callable[[], bool] | None = None,
    observe: Callable[[str, Step], None] | None = None,
    progress: Progress | None = None,
) -> TrainingResult:
    """Runs a training recipe to its end; called again, it goes on where it was.

    Args:
        plan: what the recipe runs.
        folder: receives a run folder for each seed and part; one that holds this recipe already is
            gone on with.
        seeds: how often it is run, each time from another seed, beginning with 1.
        stop: polled before each micro-batch; True saves and ends.
        observe: called after each step with the run folder's name and the step.
        progress: called with how far preparations are.

    Raises:
        RequestError: `seeds` is less than 1, or weights are missing that the user has to give.
        InputErrors: the folder holds another recipe.
        RunInterrupted: `stop` returned True; the same call goes on.
        WindlassError: a part cannot be run.
    """
    if seeds < 1:
        raise RequestError(f"`seeds` = {seeds} should be at least 1")
    plan.require_weights()
    root = Path(folder)
    _adopt(plan, root / _PLAN_FILE)
    task = _write_questions(root) if plan.asks_questions else None
    done = []
    for seed in range(1, seeds + 1):
        for part in plan.parts:
            path = root / f"seed-{seed}-{part.name}"
            for run in _unfinished(plan, part, seed, path, stop, progress):
                for step in run:
                    if observe is not None:
                        observe(path.name, step)
            done.append(_result(path, seed, part, task))
    return TrainingResult(plan=plan, parts=tuple(done))


def _adopt(plan: TrainingPlan, path: Path) -> None:
    """Keeps what a folder runs; refuses one that runs something else."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    elif (held := TrainingPlan.load(path)) != plan:
        words = " ".join((held.recipe, *held.overrides, "--scale", held.scale))
        raise InputErrors(
            [f"`{path.parent}` holds `windlass recipe {words}`; name another folder for this one"]
        )


def _unfinished(
    plan: TrainingPlan,
    part: RecipePart,
    seed: int,
    path: Path,
    stop: Callable[[], bool] | None,
    progress: Progress | None,
) -> Iterator[Run]:
    """The run of a part, new or gone on with; nothing if it has finished."""
    if not path.is_dir():
        request = _runnable(plan.request(part, seed=seed), part, path)
        parent = path.with_name(f"seed-{seed}-{part.parent}") if part.parent else None
        yield train(
            request,
            folder=path,
            parent=None if parent is None else find_parent(parent),
            stop=stop,
            progress=progress,
        )
    elif load(path).state != "finished":
        yield resume(path, stop=stop, progress=progress)


def _runnable(request: Request, part: RecipePart, path: Path) -> Request:
    """A part's request with the folders of the recipe's own files.

    Args:
        path: its run folder, beside those of other parts.
    """
    if request.data.source == CONVERSATIONS:
        source = CONVERSATIONS.replace("FOLDER", str(path.parent.absolute()))
        request = request.model_copy(
            update={"data": request.data.model_copy(update={"source": source})}
        )
    if part.base is None:
        return request
    base = path.with_name(f"{path.name.removesuffix(part.name)}{part.base}")
    weights = base.with_name(f"{base.name}-hf")
    if weights.is_dir():
        shutil.rmtree(weights)  # a kill may have left a part of it
    export(base, to=f"hf:{weights}")
    # The folder has the model's shape.
    model = type(request.model)(name=f"hf:{weights.absolute()}")
    return request.model_copy(update={"model": model})


def _write_questions(root: Path) -> Path:
    """The task of a recipe's folder, made with its conversations unless they are there."""
    from windlass.data import QUESTIONS_TASK, save_library_questions

    task = root / f"{QUESTIONS_TASK}.yaml"
    return task if task.is_file() else save_library_questions(root)[1]


def _result(path: Path, seed: int, part: RecipePart, task: Path | None) -> PartResult:
    """What a finished part measured.

    Args:
        task: what is asked after the last step; None asks nothing.
    """
    steps = load(path).steps
    if not steps:
        raise RecordError(f"run `{path}` has recorded no step")
    return PartResult(
        seed=seed,
        part=part.name,
        folder=path,
        steps=steps[-1].step,
        seconds=sum(step.seconds for step in steps),
        first_loss=steps[0].loss,
        held_out_loss=_token_loss(steps[-1]),
        accuracy=steps[-1].held_out_accuracy if task is None else _accuracy(path, task),
    )


def _token_loss(step: Step) -> float | None:
    """The held-out loss of a step without that of pairs of sentences."""
    if step.held_out_loss is None:
        return None
    return step.held_out_loss - (step.held_out_sentence_loss or 0.0)


def _accuracy(path: Path, task: Path) -> float:
    """The share of a task's questions that a run answers right; its scores are kept."""
    kept = sorted((path / EVALUATIONS_FOLDER).glob(f"*.{task.stem}.*.json"))
    score = TaskScore.load(kept[-1]) if kept else evaluate(path, task)[0]
    return score.metric("acc")
