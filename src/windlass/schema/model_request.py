"""ModelRequest: which model, by name and dials. Requests and plans contain one."""

from pydantic import Field

from windlass.document import Document


class ModelRequest(Document):
    """A model by name or file, with overrides of its size."""

    name: str = "gpt-tiny"
    """A name from the model catalog, or `file.py:function` that returns an `nn.Module`."""
    layers: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    ffn: int | None = Field(default=None, ge=1)
    vocabulary: int | None = Field(default=None, ge=2)
    """Vocabulary size; None means the model's own, which must cover the tokenizer's."""
    sequence: int | None = Field(default=None, ge=2)
    """Longest sequence with learned positions, in tokens; None means the model's own."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    split_blocks: bool | None = None
    """Makes attention and feed-forward separate layers, so that a stage may end between them; None
    means one layer per block."""
    sharding_rules: dict[str, str] | None = None
    """How to shard modules of a model file over tensor-parallel ranks, by pattern of their names:
    `region`, `column`, `row`, `vocabulary`, ...; None means the model's own rules."""
