"""Statistics of prepared text: what it holds, and how its sources are mixed."""

from typing import ClassVar

import numpy as np

from windlass.data.keyed_choices import source_mixture
from windlass.data.token_files import DatasetMeta, TokenDataset
from windlass.document import Document
from windlass.schema import DataRequest


class DatasetStatistics(Document):
    """What a text holds."""

    quantiles: ClassVar[tuple[float, ...]] = (0.0, 0.5, 0.95, 1.0)
    """The quantiles of `document_tokens`: shortest, median, 95 % and longest."""

    meta: DatasetMeta
    """Counts of the training and the held-out side, and of each source."""
    tokens_fingerprint: str
    """Hash of the tokens; runs with equal ones train on the same text."""
    shares: tuple[float, ...]
    """Share of the training sequences that comes from each source."""
    document_tokens: tuple[int, ...]
    """Tokens of a training document at the `quantiles`, with its end of text."""
    notes: tuple[str, ...] = ()
    """What of the sources was not read, a sentence each."""


def dataset_statistics(data: DataRequest, tokens: TokenDataset) -> DatasetStatistics:
    """The statistics of a request's text."""
    sources = tokens.meta.train.sources
    shares = source_mixture(data.weights or [part.tokens for part in sources], 0).shares
    lengths = np.quantile(np.diff(tokens.documents.starts), DatasetStatistics.quantiles)
    return DatasetStatistics(
        meta=tokens.meta,
        tokens_fingerprint=tokens.fingerprint,
        shares=tuple(share / sum(shares) for share in shares),
        document_tokens=tuple(round(length) for length in lengths.tolist()),
        notes=tokens.notes,
    )
