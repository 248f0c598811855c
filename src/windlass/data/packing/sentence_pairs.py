"""Rows of sentence pairs: the second one follows the first in its document, or it does not.

Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1, "next sentence prediction". A sentence
is any span of text there, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from windlass.data.batches import TokenBatch
from windlass.data.keyed_choices import MlmMasking, keyed_number
from windlass.data.packing.row_batches import Row, RowBatches, Split, order_rows
from windlass.data.packing.row_layout import Integers, RowLayout, lay_out_pieces
from windlass.data.token_files import StoredTokenIds, TokenDataset
from windlass.schema import SENTENCES_PER_ROW

FOLLOWS, IS_RANDOM = 0, 1
"""What a sentence head says of a pair, as in BERT's own code."""
_ADDED = 3
"""Tokens beside those of the text: `[CLS] A [SEP] B [SEP]`."""
_CHOICE = 0
"""Marks keys of choices that are about a pair, beside those of its masks."""
_TRIES, _TRIES_ELSEWHERE = 16, 8
"""Pieces that are looked at for a second sentence of the right length, and how many of them have to
be of another document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTokens:
    """The special tokens of sentence pairs."""

    first: int
    """Id of the token before a pair, of which the sentence head reads the vector."""
    separator: int
    """Id of the token behind each sentence."""
    second_offset: int
    """What is added to the ids of the second sentence, the entries of the model's vocabulary. So
    one number says a token and its segment."""


class _Pair(NamedTuple):
    """A pair in the tokens of its split."""

    first: slice
    second: slice
    sentence: int
    """`FOLLOWS` or `IS_RANDOM`."""
    key: tuple[int, ...]

    @property
    def offsets(self) -> TokenBatch:
        """Where the tokens of both sentences stand, `Int[token]`."""
        spans = (self.first, self.second)
        return np.concatenate([np.arange(span.start, span.stop) for span in spans])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentencePairs:
    """Pieces of documents are cut in two, and every other second part is exchanged.

    It is exchanged for as many tokens of another document of the source, where one is found. Each
    pair is a document of its row; the fill behind it is another one, so that no pair sees it.
    Targets `Int[s + p]` are those of masked tokens, then of up to p pairs.
    """

    tokens: TokenDataset
    sequence: int
    masking: MlmMasking
    special: PairTokens
    packing: bool

    def lay_out(self, starts: Integers, split: Split) -> RowLayout:
        """The rows of consecutive documents."""
        del split

        def counts(lengths: Integers) -> Integers:
            return np.stack((self.masking.target_counts(lengths), np.ones_like(lengths)), axis=1)

        most = SENTENCES_PER_ROW if self.packing else 1
        return lay_out_pieces(starts, self.sequence, counts, added=_ADDED, most=most)

    def shortage(self, side: str, source: str, layout: RowLayout) -> str:
        """Why a source has no row."""
        del layout
        return (
            f"none of the {side} documents of `{source}` makes a pair of sentences within "
            f"{self.sequence} tokens, {_ADDED} of which stand around them; raise `train.sequence`, "
            "or take more text"
        )

    def empty(self, count: int) -> tuple[TokenBatch, TokenBatch]:
        """Inputs `Int[count s]` that are fill, and targets `Int[count s+p]` of which none counts.

        With p of `SENTENCES_PER_ROW`.
        """
        inputs = np.full((count, self.sequence), self.tokens.meta.end_of_text, dtype=np.int64)
        width = self.sequence + SENTENCES_PER_ROW
        return inputs, np.full((count, width), self.masking.ignore_index, dtype=np.int64)

    def write(
        self, inputs: TokenBatch, targets: TokenBatch, row: Row, key: tuple[int, ...]
    ) -> None:
        """Writes a row's inputs `Int[s]` and targets `Int[s + p]`."""
        tokens = self._tokens(row.split)
        begin = 0
        for place, pair in enumerate(self._pairs(row, key)):
            masked, learned = self.masking.mask(tokens[pair.offsets].astype(np.int64), *pair.key)
            targets[self.sequence + place] = pair.sentence
            inputs[begin] = self.special.first
            begin += 1
            done = 0
            for span, added in ((pair.first, 0), (pair.second, self.special.second_offset)):
                count = span.stop - span.start
                inputs[begin : begin + count] = masked[done : done + count] + added
                targets[begin : begin + count] = learned[done : done + count]
                inputs[begin + count] = self.special.separator + added
                begin, done = begin + count + 1, done + count

    def learned_offsets(self, row: Row) -> TokenBatch:
        """Where the masked tokens of a held-out row stand in their split."""
        return np.concatenate(
            [
                pair.offsets[self.masking.masked_positions(len(pair.offsets), *pair.key)]
                for pair in self._pairs(row, ())
            ]
        )

    def _pairs(self, row: Row, key: tuple[int, ...]) -> Iterator[_Pair]:
        """The pairs of a row, in order."""
        layout = row.layout
        for place in layout.row(row.index):
            start, length = int(layout.starts[place]), int(layout.lengths[place]) - _ADDED
            own = (*key, start)
            cut = start + 1 + keyed_number(length - 1, *own, _CHOICE, 0)
            second, sentence = slice(cut, start + length), FOLLOWS
            if keyed_number(2, *own, _CHOICE, 1) == IS_RANDOM:
                other = _elsewhere(layout, place, second.stop - second.start, own)
                second, sentence = (second, FOLLOWS) if other is None else (other, IS_RANDOM)
            yield _Pair(slice(start, cut), second, sentence, own)

    def _tokens(self, split: Split) -> StoredTokenIds:
        return self.tokens.train if split == "train" else self.tokens.held_out


def _elsewhere(layout: RowLayout, place: int, count: int, key: tuple[int, ...]) -> slice | None:
    """So many tokens in a row of another document, or else of another piece; None if none is found.

    Args:
        place: of the piece that needs another one's tokens.
    """
    for attempt in range(_TRIES):
        number = 2 + 2 * attempt
        other = keyed_number(len(layout.documents), *key, _CHOICE, number)
        spare = int(layout.lengths[other]) - _ADDED - count
        is_near = layout.documents[other] == layout.documents[place]
        if spare < 0 or other == place or (is_near and attempt < _TRIES_ELSEWHERE):
            continue
        shift = keyed_number(spare + 1, *key, _CHOICE, number + 1)
        start = int(layout.starts[other]) + shift
        return slice(start, start + count)
    return None


def sentence_pair_batches(
    tokens: TokenDataset,
    *,
    sequence: int,
    batch: int,
    seed: int,
    masking: MlmMasking,
    special: PairTokens,
    weights: tuple[float, ...] | None = None,
    packing: bool = False,
) -> RowBatches:
    """Batches of sentence pairs; cuts, exchanges and masks differ from epoch to epoch.

    Args:
        sequence: tokens of a row.
        batch: global batch, in rows.
        seed: of the order and of all that is drawn.
        weights: share of the samples of each source; None takes them in proportion to their rows.
        packing: whether up to `SENTENCES_PER_ROW` pairs share a row; otherwise a row is one.

    Raises:
        DataError: a source has no pair.
    """
    writer = SentencePairs(
        tokens=tokens, sequence=sequence, masking=masking, special=special, packing=packing
    )  # fmt: skip
    order = order_rows(
        tokens, writer, sequence=sequence, batch=batch, seed=seed, weights=weights
    )  # fmt: skip
    notes = (order.packing_note("pairs of sentences"),)
    return RowBatches(
        tokens=tokens, order=order, writer=writer, notes=notes, is_packed=True
    )  # fmt: skip
