"""Batches that a run leaves out from its newest checkpoint on, such as those of a loss spike."""

from collections.abc import Sequence
from dataclasses import replace

from windlass.errors import RequestError
from windlass.jobs import Planned
from windlass.schema import CHECKPOINT_FOLDER, TrainSettings
from windlass.tracking import RunRecord


def with_skipped_batches(planned: Planned, record: RunRecord, ranges: Sequence[str]) -> Planned:
    """The same run, which takes no batch of some ranges.

    Args:
        ranges: such as `120-125`, in addition to those that it leaves out already.

    Raises:
        RequestError: a text is no range, or a batch was taken already by the newest checkpoint.
    """
    from windlass.data import batch_of_step
    from windlass.runtime import latest_checkpoint

    train = planned.request.train
    checkpoint = latest_checkpoint(record.folder / CHECKPOINT_FOLDER)
    done = checkpoint.manifest.step if checkpoint else 0
    taken = batch_of_step(done, train.skip_batches) if done else 0
    content = train.model_dump(exclude_none=True)
    content["skip_batches"] = (*(train.skip_batches or ()), *ranges)
    try:
        settings = TrainSettings.model_validate(content)
    except ValueError as error:
        raise RequestError(
            f"`--skip-batches {' '.join(ranges)}`: write a batch, or the first and the last one of "
            "some, such as `120-125`"
        ) from error
    late = [text for text in ranges if int(text.partition("-")[0]) <= taken]
    if late:
        raise RequestError(
            f"`--skip-batches {late[0]}`: run `{record.folder.name}` has taken batch {taken} at "
            f"step {done}, its newest checkpoint; start a new run from an earlier one with "
            f"`windlass train --from {record.folder}@STEP --continue train.skip_batches={late[0]}`"
        )
    return replace(planned, request=planned.request.model_copy(update={"train": settings}))
