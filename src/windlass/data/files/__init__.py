"""How files are opened and what they hold, found by their content where their name does not say."""

from windlass.data.files.arrow_file import arrow_batches, arrow_row_count, open_arrow_table
from windlass.data.files.compressed_file import COMPRESSED_SUFFIXES, open_text_file, plain_suffix
from windlass.data.files.csv_file import CSV_SUFFIXES, csv_fields, csv_rows
from windlass.data.files.json_file import JsonLayout, json_array_rows, json_layout

__all__ = [
    "COMPRESSED_SUFFIXES", "CSV_SUFFIXES", "JsonLayout", "arrow_batches", "arrow_row_count",
    "csv_fields", "csv_rows", "json_array_rows", "json_layout", "open_arrow_table",
    "open_text_file", "plain_suffix",
]  # fmt: skip
