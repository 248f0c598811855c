"""The data of the run beside plain PyTorch: a few sequences of the request's own."""

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.jobs import Planned, Progress, prepare_data
from windlass.schema import EXAMPLES_FILE, TOKENS_FOLDER
from windlass.training import make_batches
from windlass.verify.plain_plans import SMALL_BATCH, SMALL_STEPS

if TYPE_CHECKING:
    from windlass.data import Batches, ExampleBatches, RowBatches, TokenDataset

_DOCUMENTS, _PACKED_DOCUMENTS = 3, 12
"""Documents of each source; windows take no notice of them, pairs of sentences do, and rows hold
several where they are packed."""

_MIN_EPOCH = 2
"""Fewest sequences of an epoch that have an order."""


def write_small_data(
    small: Planned, folder: Path, progress: Progress | None
) -> "Batches | ExampleBatches | RowBatches":
    """Writes the data of that run into its folder, a part of the others', and opens it.

    Args:
        small: a plan as `small_plan` makes it.
        progress: called with what runs.

    Raises:
        WindlassError: the data cannot be read, or the disk is full.
    """
    from windlass.data import ExampleBatches, ExampleDataset, open_dataset

    settings = small.request.train
    held_out = 2 * settings.evaluate_sequences
    data = small.objects.examples or prepare_data(small.request, progress)
    if isinstance(data, ExampleDataset):
        few = data.excerpt(train=_epoch(), held_out=held_out)
        folder.mkdir(parents=True)
        few.save(folder / EXAMPLES_FILE)
        return ExampleBatches(few, batch=settings.batch, seed=settings.seed)
    excerpt = folder / TOKENS_FOLDER
    _write_excerpt(small, data, excerpt, held_out)
    return make_batches(small, open_dataset(excerpt) or data)


def _write_excerpt(small: Planned, tokens: "TokenDataset", folder: Path, held_out: int) -> None:
    """Writes some conversations, or beginnings of texts."""
    from windlass.data import RowBatches, beginnings, documents_of_rows, write_excerpt

    settings, data = small.request.train, small.request.data
    shares = data.weights or [part.tokens for part in tokens.meta.train.sources]
    epochs = [_epoch(share / sum(shares)) for share in shares]
    batches = make_batches(small, tokens)
    if isinstance(batches, RowBatches) and tokens.conversations is not None:
        train, held = documents_of_rows(batches, train=epochs, held_out=held_out)
    else:
        train, held = beginnings(
            tokens,
            # The rest fills no window, so that the rotation of an epoch shows.
            train=[epoch * settings.sequence + settings.sequence // 2 for epoch in epochs],
            # Twice the windows that are evaluated, so that they lie apart.
            held_out=held_out * settings.sequence + 1,
            documents=_PACKED_DOCUMENTS if data.packing else _DOCUMENTS,
            uneven=data.packing,
        )
    write_excerpt(tokens, folder, train=train, held_out=held)


def _epoch(share: float = 1.0) -> int:
    """Sequences of an epoch of a source with a share of the text."""
    return max(_MIN_EPOCH, round(SMALL_STEPS * SMALL_BATCH / 2 * share))
