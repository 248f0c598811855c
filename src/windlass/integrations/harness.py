"""Tasks of lm-evaluation-harness: by their names in its library, or as YAML files of its form."""

import contextlib
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.errors import RequestError, WindlassError, did_you_mean, shorten
from windlass.schema import TaskMetric, TaskScore

if TYPE_CHECKING:
    from windlass.integrations.lm_eval import ScoredModel

_YAML = (".yaml", ".yml")
_LIKELIHOODS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
_FEW_SHOT_SEED = 1234
"""Seed of the solved questions that are drawn, as in `simple_evaluate`."""


class Harness:
    """Tasks that models are scored on, as lm-evaluation-harness reads and scores them.

    Args:
        tasks: names in its library, or YAML files.
        folder: the small files of the model's export: tokenizer and `config.json`.
        shots: solved questions before each question; None means as many as each task says.
        limit: most questions of each task; None asks all.
        chat: whether questions stand in the model's chat template.
        system: with `chat`, the system prompt.

    Raises:
        RequestError: the harness is not installed, there is no such task, or it cannot be read.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        folder: Path,
        *,
        shots: int | None = None,
        limit: int | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        self._folder, self._limit, self._chat, self._system = folder, limit, chat, system
        with _quietly():
            self._library = _library()
            self._tasks = _loaded(self._library, tasks)
        for task in self._tasks["tasks"].values():
            own = task.get_config("num_fewshot")
            # The harness leaves a task alone whose file says 0.
            if own is None or (shots is not None and own != 0):
                task.set_config(key="num_fewshot", value=shots or 0)
            task.set_fewshot_seed(seed=_FEW_SHOT_SEED)

    def require_likelihoods(self) -> None:
        """Refuses tasks that let a model write.

        Raises:
            RequestError: one does.
        """
        for name, task in self._tasks["tasks"].items():
            if task.OUTPUT_TYPE not in _LIKELIHOODS:
                raise RequestError(
                    f"task `{name}` lets the model write (`{task.OUTPUT_TYPE}`), which a run in "
                    "training does not; score it afterwards by `windlass evaluate`"
                )

    def scores(
        self, model: "ScoredModel", *, step: int | None = None, bootstrap: bool = True
    ) -> tuple[TaskScore, ...]:
        """The scores of a model, one for each task and each group of tasks.

        Args:
            model: answers.
            step: the step of its checkpoint.
            bootstrap: whether standard errors are drawn, which takes a second.

        Raises:
            RequestError: what the tasks ask for is not computed, or a question is too long.
        """
        with _quietly():
            from windlass.integrations.lm_eval import WindlassLM

            try:
                results = self._library.evaluate(
                    WindlassLM(model, self._folder), self._tasks, limit=self._limit,
                    bootstrap_iters=100_000 if bootstrap else 0, log_samples=True,
                    system_instruction=self._system, apply_chat_template=self._chat,
                    fewshot_as_multiturn=self._chat,
                )  # fmt: skip
            except WindlassError:
                raise
            except Exception as error:  # tasks raise anything
                raise RequestError(
                    f"lm-evaluation-harness cannot score {', '.join(self._tasks['tasks'])}: "
                    f"{_first_line(error)}"
                ) from error
        return tuple(
            TaskScore(
                task=name,
                shots=_shots(results, name),
                step=step,
                chat=self._chat,
                metrics=tuple(_metrics(values)),
                answers=_answers(results["samples"].get(name, ())),
            )
            for name, values in results["results"].items()
        )

    def fingerprint(self, longest: int | None) -> str:
        """A hash of all that the tasks ask, in the order in which they ask it.

        Args:
            longest: most tokens that the model reads; None if it sets no limit.

        Raises:
            RequestError: as `scores`.
        """
        asked = _Asked(longest)
        self.scores(asked, bootstrap=False)
        return hashlib.sha256(json.dumps(asked.choices).encode()).hexdigest()


class _Asked:
    """A model that finds nothing likely, and keeps what it was asked."""

    def __init__(self, max_sequence: int | None) -> None:
        self.max_sequence = max_sequence
        self.choices: list[EncodedChoice] = []

    def log_likelihoods(self, choices: Sequence[EncodedChoice]) -> list[ChoiceLikelihood]:
        self.choices += choices
        return [ChoiceLikelihood(-1.0, is_greedy=False) for _ in choices]


def task_names(tasks: Sequence[str]) -> list[str]:
    """Tasks by name or by absolute path; a list of names may be one word, divided by commas."""
    names = [name for word in tasks for name in word.split(",") if name]
    return [str(Path(name).expanduser().absolute()) if _is_file(name) else name for name in names]


def _is_file(name: str) -> bool:
    return name.endswith((*_YAML, ".toml")) or "/" in name


def _library() -> Any:  # noqa: ANN401  a package without types
    try:
        import_module("lm_eval.models.huggingface")
        return import_module("lm_eval")
    except ImportError as error:
        raise RequestError(
            f"tasks are scored by lm-evaluation-harness, which lacks `{error.name}`; install it "
            "with `pip install 'windlass[hf]'`"
        ) from None


def _loaded(library: Any, tasks: Sequence[str]) -> dict[str, Any]:  # noqa: ANN401
    """The tasks and groups as `TaskManager.load` gives them.

    Raises:
        RequestError: there is no such task, two have one name, or one cannot be read.
    """
    files = [name for name in tasks if _is_file(name)]
    for file in map(Path, files):
        if file.suffix == ".toml":
            raise RequestError(
                f"`{file}`: tasks are YAML files of lm-evaluation-harness, or names in its library "
                "(`windlass evaluate RUN --tasks hellaswag`)"
            )
        if not file.is_file():
            near = [other.name for other in file.parent.glob("*.y*ml")]
            raise RequestError(f"no file `{file}`{did_you_mean(file.name, near)}")
    tasks_of_library = import_module("lm_eval.tasks")
    manager = tasks_of_library.TaskManager(include_defaults=len(files) < len(tasks))
    for name in tasks:
        if name not in files and name not in manager.task_index:
            raise RequestError(
                f"lm-evaluation-harness {library.__version__} has no task `{shorten(name)}`"
                f"{did_you_mean(name, manager.all_tasks)}"
            )
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in tasks:
        try:
            one = manager.load([name])
        except Exception as error:  # files, data sets and the hub raise anything
            raise RequestError(f"task `{name}` cannot be read: {_first_line(error)}") from error
        if double := sorted(loaded["tasks"].keys() & one["tasks"].keys()):
            raise RequestError(
                f"two of the tasks are named `{double[0]}`; give each a name of its own (`task` in "
                "its YAML file), or name it once"
            )
        for key in loaded:
            loaded[key] |= one[key]
    return loaded


def _shots(results: Mapping[str, Any], name: str) -> int:
    """Solved questions before each question; 0 of a group, whose tasks may differ."""
    return int(results["n-shot"].get(name) or 0)


def _metrics(values: Mapping[str, Any]) -> Iterator[TaskMetric]:
    for key, value in values.items():
        metric, _, of_filter = key.partition(",")
        if not of_filter or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{of_filter}")
        name = metric if of_filter == "none" else f"{metric}.{of_filter}"
        yield TaskMetric(
            name=name,
            value=float(value),
            standard_error=float(error) if isinstance(error, int | float) else None,
        )


def _answers(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """What each question counts, by metric; those of metrics that count no numbers are left out."""
    answers: dict[str, list[float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if isinstance(value := sample[metric], int | float):
                of_filter = sample["filter"]
                name = metric if of_filter == "none" else f"{metric}.{of_filter}"
                answers.setdefault(name, []).append(float(value))
    return {name: tuple(values) for name, values in answers.items()}


def _first_line(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}".splitlines()[0])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps the harness and what it reads from drawing progress and warning of itself."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
