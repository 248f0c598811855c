"""`data_statistics` prepares a text and says what it holds, without a model."""

from typing import TYPE_CHECKING

from windlass.api.machines import Progress
from windlass.api.training.inputs.run_data import prepare_tokens
from windlass.schema import Request

if TYPE_CHECKING:
    from windlass.data import DatasetStatistics


def data_statistics(request: Request, *, progress: Progress | None = None) -> "DatasetStatistics":
    """The statistics of a request's text, which is tokenized first unless it was before.

    Args:
        request: its `data` counts.
        progress: called with how far reading and tokenizing are.

    Raises:
        DataError: a text is missing, empty or too short.
        InputErrors: several documents cannot be read.
    """
    from windlass.data import dataset_statistics

    return dataset_statistics(request.data, prepare_tokens(request, progress))
