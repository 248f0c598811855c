"""Reads the runs of a recipe with arms, scores their checkpoints, and compares them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from windlass.data import (
    CODE_CHOICES,
    code_tasks,
    held_out_texts,
    save_questions,
    standard_error,
)
from windlass.errors import DataError, RecordError, RunInterrupted
from windlass.experiments.recipes.recipe_plan import RecipeArm, RecipePlan, request_of
from windlass.experiments.sweeping.sweep import Sweep
from windlass.inference import score
from windlass.jobs import Progress, load, prepare_tokens
from windlass.judge import (
    Arm,
    ArmCurve,
    Budget,
    Comparison,
    arm_sentence,
    compare_arms,
    comparison_sentence,
)
from windlass.report import ArmFacts, ArmScore, ArmsReport
from windlass.schema import CHECKPOINT_FOLDER, TaskScore
from windlass.sweep import ARM, Trial

_QUESTIONS, _SHOTS = 120, (0, 2)
_TASKS_FOLDER, _SCORES_FOLDER = "tasks", "scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """A run whose checkpoints are scored."""

    arm: str
    folder: Path
    curve: ArmCurve


def make_report(
    plan: RecipePlan,
    sweep: Sweep,
    root: Path,
    *,
    stop: Callable[[], bool],
    progress: Progress | None,
) -> ArmsReport:
    """The report of a recipe whose runs have ended; scores are kept, and not made twice.

    Args:
        stop: polled before each score.

    Raises:
        RunInterrupted: `stop` returned True; the same call goes on.
        WindlassError: a run cannot be read.
    """
    runs = [
        _Scored(
            arm=arm.name,
            folder=root / trial.run,
            curve=_curve(arm, trial, root / trial.run),
        )
        for arm in plan.arms
        for trial in sweep.trials
        if trial.params[ARM] == arm.name
    ]
    arms = [
        Arm(name=arm.name, curves=tuple(run.curve for run in runs if run.arm == arm.name))
        for arm in plan.arms
    ]
    comparisons = compare_arms(arms)
    tasks, notes = make_tasks(plan, root, progress)
    scorer = _Scorer(root, tasks, stop, progress)
    scores = tuple(_scores(scorer, runs, arms, comparisons))
    return ArmsReport(
        heading=f"{plan.recipe}, {plan.scale}, {comparisons[0].seeds} seeds",
        notes=(*plan.notes, *notes),
        sentences=tuple(_sentences(plan, comparisons)),
        arms=tuple(arms),
        facts=tuple(_facts(plan)),
        comparisons=comparisons,
        scores=scores,
        questions=_QUESTIONS if tasks else 0,
        chance=1 / CODE_CHOICES if tasks else 0.0,
    )


def _curve(arm: RecipeArm, trial: Trial, folder: Path) -> ArmCurve:
    """The held-out losses of a run, and what it had used by then."""
    tokens = seconds = 0.0
    rows: list[tuple[int, float, float, float, float]] = []
    for step in load(folder).steps:
        tokens += step.tokens
        seconds += step.seconds
        if step.held_out_loss is not None:
            flop = arm.flop_after(step.step)
            rows.append((step.step, tokens, flop, seconds, step.held_out_loss))
    if not rows:
        raise RecordError(f"run `{folder}` has recorded no held-out loss")
    columns = tuple(zip(*rows, strict=True))
    return ArmCurve(
        seed=int(trial.params["train.seed"]),
        steps=columns[0],
        tokens=columns[1],
        flop=columns[2],
        seconds=columns[3],
        losses=columns[4],
    )


def _sentences(plan: RecipePlan, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """One for each budget; then one for each sparse arm beside the last, narrower one."""
    yield from map(comparison_sentence, comparisons)
    _, *middle, last = (arm.name for arm in plan.arms)
    yield from filter(None, (arm_sentence(comparisons, name, last) for name in middle))


def _facts(plan: RecipePlan) -> Iterator[ArmFacts]:
    tokens = int(plan.settings["train.batch"]) * int(plan.settings["train.sequence"])
    for arm in plan.arms:
        yield ArmFacts(
            name=arm.name,
            meaning=arm.meaning,
            parameters=arm.parameters,
            token_flop=tuple(leg.flop / tokens for leg in arm.legs),
            steps=arm.steps,
            predicted_seconds=arm.predicted_seconds,
        )


def make_tasks(
    plan: RecipePlan, root: Path, progress: Progress | None
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The tasks of a folder, made of the recipe's held-out text at first; or why there are none."""
    folder = root / _TASKS_FOLDER
    files = sorted(folder.glob("*.yaml"))
    if not files:
        texts = held_out_texts(prepare_tokens(request_of(plan.settings), progress))
        try:
            made = code_tasks(texts, items=_QUESTIONS, examples=max(_SHOTS))
        except DataError as error:
            return (), (f"No questions were asked: {error}.",)
        files = sorted(
            save_questions(task.name, task.questions, folder, examples=task.examples)
            for task in made
        )
    return tuple(files), ()


class _Scorer:
    """Scores checkpoints, and keeps each score in a file."""

    def __init__(
        self,
        root: Path,
        tasks: Sequence[Path],
        stop: Callable[[], bool],
        progress: Progress | None,
    ) -> None:
        self._folder, self._stop, self._progress = root / _SCORES_FOLDER, stop, progress
        self.asked = list(product(tasks, _SHOTS))
        self.made = 0

    def score(self, run: Path, step: int, task: Path, shots: int) -> TaskScore:
        """The score of a run's checkpoint on a task.

        Raises:
            RunInterrupted: a stop was asked for.
        """
        file = self._folder / f"{run.name}-{step}-{task.stem}-{shots}.json"
        if not file.is_file():
            if self._stop():
                raise RunInterrupted("scoring stopped; the same command goes on")
            score(run, task, step=step, shots=shots).save(file)
        self.made += 1
        if self._progress is not None:
            self._progress("scoring", self.made, None)
        return TaskScore.load(file)


def _scores(
    scorer: _Scorer, runs: Sequence[_Scored], arms: Sequence[Arm], comparisons: Sequence[Comparison]
) -> Iterator[ArmScore]:
    """The mean score of each arm's seeds at each budget that all of them have used up."""
    for comparison, arm in product(comparisons, arms):
        if comparison.bands[arm.name] is None:
            continue
        own = [run for run in runs if run.arm == arm.name]
        steps = [_nearest(run, comparison.budget, comparison.amount) for run in own]
        for task, shots in scorer.asked:
            found = [
                scorer.score(run.folder, step, task, shots)
                for run, step in zip(own, steps, strict=True)
            ]
            yield _mean_score(arm.name, comparison.budget, steps[0], found)


def _nearest(run: _Scored, budget: Budget, amount: float) -> int:
    """The step of the checkpoint whose run had used most nearly an amount."""
    from windlass.runtime import checkpoint_folders

    used = dict(zip(run.curve.steps, run.curve.used(budget), strict=True))
    folders = checkpoint_folders(run.folder / CHECKPOINT_FOLDER)
    saved = [step for path in folders if (step := int(path.name.rpartition("-")[2])) in used]
    if not saved:
        raise RecordError(f"run `{run.folder}` keeps no checkpoint at a step that was evaluated")
    return min(saved, key=lambda step: abs(used[step] - amount))


def _mean_score(arm: str, budget: Budget, step: int, found: Sequence[TaskScore]) -> ArmScore:
    """The mean over seeds; the standard error is over questions, each the mean of its answers."""
    plain, normalised = (
        [fmean(answers) for answers in zip(*(one.answers[metric] for one in found), strict=True)]
        for metric in ("acc", "acc_norm")
    )
    return ArmScore(
        arm=arm,
        budget=budget,
        step=step,
        task=found[0].task,
        shots=found[0].shots,
        accuracy=fmean(plain),
        error=standard_error(plain),
        normalised=fmean(normalised),
        normalised_error=standard_error(normalised),
    )
