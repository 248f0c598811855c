"""Batches whose rows are whole documents, each apart from the others."""

from windlass.data.packing.document_batches import DocumentBatches
from windlass.data.packing.masked_batches import MaskedBatches
from windlass.data.packing.row_layout import RowLayout, lay_out_rows

__all__ = ["DocumentBatches", "MaskedBatches", "RowLayout", "lay_out_rows"]
