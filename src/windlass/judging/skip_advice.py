"""The command that goes on from before a loss spike without the batches of that spike."""

import contextlib
import shlex
from pathlib import Path

from windlass.errors import WindlassError
from windlass.judge import Verdict
from windlass.schema import CHECKPOINT_FOLDER
from windlass.tracking import load_run
from windlass.training import planned_from_record


def with_skip_advice(verdict: Verdict, folder: Path) -> Verdict:
    """A verdict that also names the batches of a loss spike, and the command that leaves them out.

    Args:
        verdict: the verdict on a run.
        folder: the run's; one that no loop of Windlass has trained gets no advice.
    """
    if verdict.spike is None:
        return verdict
    with contextlib.suppress(WindlassError):
        sentence = _advice(verdict.spike, folder)
        return verdict.model_copy(update={"sentences": (*verdict.sentences, sentence)})
    return verdict


def _advice(spike: tuple[int, int], folder: Path) -> str:
    """The batches that the steps of a spike took, and what leaves them out.

    Raises:
        WindlassError: the run's request cannot be read.
    """
    from windlass.data import batch_of_step
    from windlass.runtime import checkpoint_folders

    record = load_run(folder)
    request = planned_from_record(record).request
    first, last = (batch_of_step(step, request.train.skip_batches) for step in spike)
    batches = str(first) if first == last else f"{first}-{last}"
    taken = f"the spike took {'batch' if first == last else 'batches'} {batches}"
    without = "it" if first == last else "them"
    saved = [int(path.name.rpartition("-")[2]) for path in checkpoint_folders(
        folder / CHECKPOINT_FOLDER
    )]  # fmt: skip
    before = [step for step in saved if step < spike[0]]
    run = shlex.quote(str(folder))
    if not before:
        return (
            f"{taken}, and no checkpoint from before it is kept; a new run with "
            f"`train.skip_batches={batches}` leaves {without} out"
        )
    if max(saved) < spike[0]:
        return f"{taken}; `windlass resume {run} --skip-batches {batches}` leaves {without} out"
    command = f"windlass train --from {run}@{max(before)} --continue train.skip_batches={batches}"
    return f"{taken}; `{command}` goes on from step {max(before)} without {without}"
