"""The tasks that a run scores while it trains."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from windlass.atomic_files import atomic_write
from windlass.document import read_json_object
from windlass.errors import RequestError
from windlass.jobs import write_small_files
from windlass.models import is_causal
from windlass.schema import TASKS_FOLDER, TOKENIZER_FILE, ResolvedRequest

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset
    from windlass.integrations import Harness
    from windlass.runtime import LogLikelihoods

_NAMES_FILE = "tasks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    """Tasks by name or path, with what a run folder keeps of them."""

    files: Mapping[str, bytes]
    """Content by file name: which tasks there are, a hash of what they ask, and the tokenizer's
    files as an export of the run has them."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Writes them into the folder of a run, and returns the names of the files."""
        for name, content in self.files.items():
            atomic_write(folder / TASKS_FOLDER / name, content)
        return tuple(f"{TASKS_FOLDER}/{name}" for name in sorted(self.files))


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessScorer:
    """Scores the model of a run in training."""

    harness: "Harness"
    max_sequence: int | None

    def metrics(self, log_likelihoods: "LogLikelihoods") -> dict[str, float]:
        """The metrics by `TASK.METRIC`."""
        model = _Answers(log_likelihoods, self.max_sequence)
        scores = self.harness.scores(model, bootstrap=False)
        return {f"{one.task}.{each.name}": each.value for one in scores for each in one.metrics}


@dataclass(frozen=True, slots=True)
class _Answers:
    log_likelihoods: "LogLikelihoods"
    max_sequence: int | None


def requested_tasks(
    request: ResolvedRequest, tokens: "TokenDataset | ExampleDataset", longest: int | None
) -> RunTasks:
    """The tasks that a request names, all of which the run's model can answer.

    Args:
        longest: most tokens that its model reads; None if it sets no limit.

    Raises:
        RequestError: a task cannot be read, two have one name, or the model predicts no next token
            of a text.
    """
    from windlass.data import ExampleDataset
    from windlass.integrations import task_names

    if not request.train.tasks:
        return RunTasks(files={})
    if not is_causal(request.model.name):
        raise RequestError(
            f"`{request.model.name}` predicts masked tokens, and `train.tasks` are scored by the "
            "next token; leave them out, or take a causal model"
        )
    if isinstance(tokens, ExampleDataset):
        raise RequestError(
            "the run is trained on token ids and has no tokenizer, so that it cannot read "
            "`train.tasks`; leave them out"
        )
    names = task_names(request.train.tasks)
    with TemporaryDirectory() as made:
        folder = Path(made)
        tokens.tokenizer.save(folder / TOKENIZER_FILE)
        write_small_files(request.model_identity, folder / TOKENIZER_FILE, folder)
        asked = _harness(names, folder).fingerprint(longest)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files[_NAMES_FILE] = json.dumps({"tasks": names, "asked": asked}, indent=2).encode() + b"\n"
    return RunTasks(files=files)


def load_run_tasks(folder: Path, longest: int | None) -> HarnessScorer | None:
    """The tasks that a run scores while it trains; None if there are none.

    Args:
        longest: most tokens that its model reads; None if it sets no limit.

    Raises:
        RequestError: a task is gone, or asks other questions than when the run began.
    """
    path = folder / TASKS_FOLDER
    if not (path / _NAMES_FILE).is_file():
        return None
    kept = read_json_object(path / _NAMES_FILE, RequestError)
    harness = _harness(kept["tasks"], path)
    if harness.fingerprint(longest) != kept["asked"]:
        raise RequestError(
            f"the tasks of run `{folder.name}` ask other questions than when it began: "
            f"{', '.join(kept['tasks'])}; bring their files back, or train on with `--from` and "
            "`train.tasks` anew"
        )
    return HarnessScorer(harness=harness, max_sequence=longest)


def _harness(names: list[str], folder: Path) -> "Harness":
    from windlass.integrations import Harness

    harness = Harness(names, folder)
    harness.require_likelihoods()
    return harness
