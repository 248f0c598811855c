"""Reads corpora and splits them into documents to train on and documents to hold out."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from windlass.data.content_hashes import DataProgress
from windlass.data.readers import CHUNK_BYTES, RowFormat, TextDocument, UnreadableDocument
from windlass.data.sources import Corpora
from windlass.errors import raise_data_errors

_MAX_ERRORS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReader:
    """Reads corpora and splits them into training and held-out documents."""

    corpora: Corpora
    rows: RowFormat
    limit_bytes: int | None
    held_out: float
    """Share of documents to hold out, without a validation corpus: those whose name's hash is below
    it."""

    def documents(self) -> Iterator[tuple[int, TextDocument]]:
        """All documents, each with the index of its corpus; `summarize` must have found no errors.

        The validation corpus comes last.
        """
        for index, item in self._items():
            if isinstance(item, TextDocument):
                yield index, item

    def summarize(self, progress: DataProgress) -> "CorpusSummary":
        """Reads all documents once to count them and collect errors.

        Raises:
            DataError: a corpus has nothing to train on, or there is nothing to hold out.
        """
        errors: list[str] = []
        totals = [_CorpusTotals() for _ in self.corpora.every]
        documents = 0
        for index, item in self._items():
            if isinstance(item, UnreadableDocument):
                errors.append(item.message)
                if len(errors) == _MAX_ERRORS:
                    errors.append(f"and maybe more; reading stopped after {_MAX_ERRORS}")
                    break
                continue
            totals[index].add(item, hash_fraction(item.name, "split"), self.held_out)
            documents += 1
            if documents % 64 == 0:
                progress("reading", sum(corpus.nbytes for corpus in totals), None)
        raise_data_errors(errors or list(self._shortages(totals)))
        summary = CorpusSummary(
            nbytes=sum(corpus.nbytes for corpus in totals),
            train_nbytes=sum(corpus.train_nbytes for corpus in totals),
            held_out_below=0.0 if self.corpora.validation else self._threshold(totals),
            training_corpora=len(self.corpora.training),
        )
        raise_data_errors(
            [
                f"all {corpus.documents} documents of `{name.source}` are held out; name more "
                "text, or a text to evaluate on as `data.validation`"
                for name, corpus in zip(self.corpora.training, totals, strict=False)
                if corpus.highest < summary.held_out_below
            ]
        )
        return summary

    def _items(self) -> Iterator[tuple[int, TextDocument | UnreadableDocument]]:
        for index, corpus in enumerate(self.corpora.every):
            for item in corpus.documents(rows=self.rows, limit_bytes=self.limit_bytes):
                yield index, item

    def _shortages(self, totals: list["_CorpusTotals"]) -> Iterator[str]:
        """What is missing for a split into training and held-out documents."""
        for corpus, total in zip(self.corpora.every, totals, strict=True):
            if not total.documents:
                yield f"no text in `{corpus.source}`: everything that was read of it is empty"
        if self.corpora.validation is None and [total.documents for total in totals] == [1]:
            yield (
                f"`{self.corpora.training[0].source}` is too short: it has one document of "
                f"{totals[0].nbytes} bytes, and needs another to hold out; use more text (a single "
                f"file is split into chunks of {CHUNK_BYTES} bytes, a small one into chunks of "
                "1024), or name a text to evaluate on as `data.validation`"
            )

    def _threshold(self, totals: list["_CorpusTotals"]) -> float:
        """The hash fraction below which documents are held out: `held_out`, or nearly.

        A few documents may all fall on one side; then the outermost one changes sides.
        """
        lowest = min(corpus.lowest for corpus in totals)
        highest = max(corpus.highest for corpus in totals)
        if lowest >= self.held_out:
            return math.nextafter(lowest, 2)
        return min(self.held_out, highest)


@dataclass(slots=True)
class _CorpusTotals:
    """Counts of the documents of one corpus."""

    documents: int = 0
    nbytes: int = 0
    train_nbytes: int = 0
    lowest: float = 2.0
    """Lowest hash fraction of a document's name."""
    highest: float = -1.0

    def add(self, document: TextDocument, fraction: float, held_out: float) -> None:
        """Counts a document."""
        self.documents += 1
        self.nbytes += document.nbytes
        self.train_nbytes += document.nbytes if fraction >= held_out else 0
        self.lowest, self.highest = min(self.lowest, fraction), max(self.highest, fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """Size of all corpora and the threshold of their split."""

    nbytes: int
    """Bytes of all text in UTF-8."""
    train_nbytes: int
    """Bytes of training text in UTF-8."""
    held_out_below: float
    """Documents whose hash fraction is below this are held out."""
    training_corpora: int
    """Number of corpora that are trained on; one that follows is for validation."""

    def is_held_out(self, corpus: int, name: str) -> bool:
        """Whether a document is never trained on."""
        return corpus >= self.training_corpora or hash_fraction(name, "split") < self.held_out_below


def hash_fraction(name: str, purpose: str) -> float:
    """A number in [0, 1) from the hash of a document's name, the same on every machine."""
    digest = hashlib.blake2b(f"{purpose}\0{name}".encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest()[:6], "big") / 2**48
