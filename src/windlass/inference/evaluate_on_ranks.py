"""A run's model on several ranks of this host, which answer questions together."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windlass.atomic_files import atomic_write, scratch_folder
from windlass.distributed import joined_ranks, meeting_in_file, rank_process
from windlass.errors import RequestError, RunBroken
from windlass.jobs import NO_OBJECTS, Planned, Progress, plan_request
from windlass.program import lower
from windlass.schema import (
    CHECKPOINT_FOLDER,
    MERGED_CHECKPOINT_FOLDER,
    REQUEST_FILE,
    TOKENIZER_FILE,
    Request,
)
from windlass.tracking import RunRecord, create_run_folder
from windlass.training import (
    launch_local_ranks,
    never_stop,
    rank_server,
    request_at_step,
    require_local_machine,
    require_unchanged,
    run_documents,
    verified_programs,
)

if TYPE_CHECKING:
    from windlass.data import ChoiceLikelihood, EncodedChoice, Tokenizer
    from windlass.runtime import Checkpoint

_CHANGEABLE = ("parallel", "sharding", "batch", "memory")
"""Parts of a run's request that may be others when its model is scored."""
_CHOICES_FILE = "choices.json"
_FOLDER = "ranks"


class RanksModel(NamedTuple):
    """A run's model as the ranks of a plan hold it; it answers as a `LanguageModel` does."""

    record: RunRecord
    planned: Planned
    checkpoint: "Checkpoint"
    ema: bool
    """Whether averages that are kept beside the weights answer."""

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.record.folder

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.checkpoint.manifest.step

    @property
    def tokenizer(self) -> "Tokenizer":
        """The one that it was trained with."""
        from windlass.data import load_tokenizer

        return load_tokenizer(self.folder / TOKENIZER_FILE)

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence that it reads; None if it sets no limit."""
        return self.planned.graph.max_sequence

    def log_likelihoods(self, choices: "Sequence[EncodedChoice]") -> "list[ChoiceLikelihood]":
        """How likely the model finds each choice behind its context; starts all ranks.

        Raises:
            WindlassError: a rank failed; the message names it.
            StorageError: the run folder cannot be written to.
        """
        from windlass.data import ChoiceLikelihood
        from windlass.runtime import evaluation_checkpoint

        programs = verified_programs(self.planned)
        server = rank_server(self.planned, len(programs))
        with scratch_folder(self.record.folder) as temporary:
            # The ranks read it as they read the folder of a run that they train.
            path = temporary / _FOLDER
            run = create_run_folder(
                path, _FOLDER, documents=run_documents(self.planned, programs), meta={}, folder=path
            )
            run.end("finished")
            atomic_write(path / _CHOICES_FILE, json.dumps(choices))
            stack = NO_OBJECTS.stack(self.planned.request.model_identity, seed=None)
            into = temporary / MERGED_CHECKPOINT_FOLDER
            merged = evaluation_checkpoint(self.checkpoint, stack, into, ema=self.ema)
            options = ["--checkpoint", str(merged.path), "--score"]
            launched = launch_local_ranks(self.planned, programs, path, options, server)
            with closing(launched) as launcher:
                for answer in launcher.steps(never_stop):
                    return [ChoiceLikelihood(*pair) for pair in answer["likelihoods"]]
        raise RunBroken("the ranks ended without an answer")


def plan_ranks(
    record: RunRecord,
    checkpoint: "Checkpoint",
    overrides: Sequence[str],
    *,
    ema: bool,
    progress: Progress | None,
) -> RanksModel:
    """A run's model on the ranks of another plan, in float32; nothing is started yet.

    Args:
        overrides: `key=value` of the plan, such as `parallel.pipeline=2`.
        ema: whether averages that are kept beside the weights answer.

    Raises:
        RequestError: an override is none of a plan's, or the plan is not one of several devices
            that hold the weights in their memory.
        WindlassError: there is no such plan.
    """
    other = [each for each in overrides if each.partition("=")[0].split(".")[0] not in _CHANGEABLE]
    if other:
        raise RequestError(
            f"`{other[0]}` says nothing of the ranks that score; name keys of "
            f"{', '.join(f'`{key}`' for key in _CHANGEABLE)}, such as `parallel.pipeline=2`"
        )
    require_unchanged(record, REQUEST_FILE)
    request = Request.resolve(record.folder / REQUEST_FILE, tuple(overrides))
    request = request_at_step(request, checkpoint.manifest.step)
    request = request.model_copy(update={"precision": "float32", "compile": False, "phases": None})
    planned = plan_request(request, NO_OBJECTS, progress)
    require_local_machine(planned)
    plan = planned.plan
    if plan.parallel.devices == 1:
        raise RequestError(
            "the plan has one device, and one process scores without a plan; leave "
            f"{' and '.join(f'`{each}`' for each in overrides)} out"
        )
    if plan.offloads:
        raise RequestError(
            f"the weights do not fit the {plan.parallel.devices} devices of the plan, which would "
            "stream them; raise `memory`, or let one process stream them with `--phases`"
        )
    return RanksModel(record=record, planned=planned, checkpoint=checkpoint, ema=ema)


def score_rank(
    folder: Path, *, store: Path, rank: int, attempt: int, checkpoint: Path
) -> "list[ChoiceLikelihood]":
    """The whole work of a process that is one rank of several that score.

    Args:
        folder: a folder as `RanksModel` makes it.
        store: file of the store where the ranks meet.
        rank: the rank that this process runs.
        attempt: number of this attempt.
        checkpoint: the checkpoint, with every layer in one file.

    Returns:
        How likely the model finds each choice, the same on all ranks.

    Raises:
        WindlassError: what went wrong.
    """
    from windlass.data import EncodedChoice
    from windlass.runtime import RankContext, open_checkpoint, score_on_rank
    from windlass.torch_ext import install_allocator

    install_allocator()
    with rank_process(folder, rank, rank) as process:
        planned = process.planned
        pairs = json.loads((folder / _CHOICES_FILE).read_text("utf-8"))
        choices = [EncodedChoice(tuple(context), tuple(tokens)) for context, tokens in pairs]
        context = RankContext(
            plan=planned.plan,
            stack=planned.objects.stack(planned.request.model_identity, seed=None),
            program=lower(planned.plan, planned.graph)[rank],
            settings=planned.request.train,
            checkpoints=folder / CHECKPOINT_FOLDER,
            graph=planned.graph,
            device=process.device,
        )
        slots = process.heartbeat.slots

        def count_batch() -> None:
            slots[2] += 1

        with joined_ranks(process, meeting_in_file(process, store, rank, attempt)):
            return score_on_rank(context, open_checkpoint(checkpoint), choices, count_batch)
