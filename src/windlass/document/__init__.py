"""The base of every file: frozen pydantic models, TOML and JSON, overrides, fingerprints."""

from windlass.document.document import Document, Synonyms
from windlass.document.fields import format_overrides, format_value, leaf_fields, value_types
from windlass.document.parse import read_json_object

__all__ = [
    "Document", "Synonyms", "format_overrides", "format_value", "leaf_fields", "read_json_object",
    "value_types",
]  # fmt: skip
