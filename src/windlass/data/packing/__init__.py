"""Batches whose rows are whole documents, each apart from the others."""

from windlass.data.packing.conversation_rows import ConversationRows, conversation_batches
from windlass.data.packing.masked_rows import MaskedRows, masked_batches
from windlass.data.packing.row_batches import RowBatches
from windlass.data.packing.row_layout import RowLayout, lay_out_rows
from windlass.data.packing.sentence_pairs import PairTokens, SentencePairs, sentence_pair_batches

__all__ = [
    "ConversationRows", "MaskedRows", "PairTokens", "RowBatches", "RowLayout", "SentencePairs",
    "conversation_batches", "lay_out_rows", "masked_batches", "sentence_pair_batches",
]  # fmt: skip
