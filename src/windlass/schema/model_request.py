"""ModelRequest: which model, by name and dials. Requests and plans contain one."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, model_validator

from windlass.document import Document
from windlass.errors import RequestError, is_text

MAX_LAYERS, MAX_SIZE = 4096, 2**24
"""Most layers of a model, and its largest size of any other kind."""


def _require_text(name: str) -> str:
    if not is_text(name):
        raise RequestError("a name has no NUL character")
    return name


Name = Annotated[str, AfterValidator(_require_text)]
"""A name, or a path."""
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
"""A width, or a number of heads, tokens or entries; no model has larger ones."""


HUGGING_FACE_PREFIX = "hf:"
"""Begins the name of a Hugging Face folder."""


def is_users_own(name: str) -> bool:
    """Whether a model's name is `file.py:function`, a function in a file of the user's."""
    return not name.startswith(HUGGING_FACE_PREFIX) and (":" in name or name.endswith(".py"))


class RequestTable(Document):
    """A table of a request; the text below each key is its meaning in `windlass keys`."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)


class LoraRequest(RequestTable):
    """Low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(default=8, ge=1, le=MAX_SIZE)
    """Rank of each adapter."""
    alpha: float | None = Field(default=None, gt=0)
    """Scale of the adapters: their output counts `alpha / rank` times; None means twice the
    rank."""
    targets: tuple[Name, ...] | None = None
    """Patterns of the names of linear layers that get an adapter, or of the ends of their names,
    such as `attention.*`, or beside a folder of the hub what PEFT takes, such as `o_proj` and
    `all-linear`; None means all linear layers of the blocks."""
    ranks: dict[str, Size] | None = None
    """Other ranks than `rank`, by pattern as in `targets`; the scale stays `alpha / rank`. None has
    none."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an input of an adapter is dropped in training."""
    trained: tuple[Name, ...] | None = None
    """Patterns of full names of weights that are trained whole beside the adapters, such as
    `head.*`; PEFT calls their modules `modules_to_save`. None means the head of new classes, where
    there is one."""
    adapter: Name | None = None
    """A folder of PEFT whose adapters training begins with; rank, alpha, targets, dropout and
    trained are then the folder's. None means new adapters."""
    base: Name | None = None
    """A checkpoint of a run, or a safetensors file that `windlass export` wrote, whose weights the
    adapters stand beside; None means the model's own."""

    @property
    def scale(self) -> float:
        """What the output of an adapter is multiplied with."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class ModelRequest(RequestTable):
    """A model by name or file, with overrides of its size."""

    name: Name = "gpt-tiny"
    """A name from the model catalog, `hf:DIR` for a Hugging Face folder, or `file.py:function` that
    returns an `nn.Module`."""
    layers: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    """Number of blocks; None, here and below, means the model's own."""
    width: Size | None = None
    """Hidden size."""
    heads: Size | None = None
    """Attention heads; they divide the width."""
    kv_heads: Size | None = None
    """Key and value heads, a divisor of the heads; fewer make grouped queries."""
    ffn: Size | None = None
    """Inner width of the feed-forward branch; None keeps its ratio to the width."""
    vocabulary: Size | None = Field(default=None, ge=2)
    """Vocabulary size; None means the model's own, which must cover the tokenizer's."""
    sequence: Size | None = Field(default=None, ge=2)
    """Longest sequence with learned positions, in tokens; None means the model's own."""
    input_shape: tuple[Size, ...] | None = Field(default=None, min_length=1, max_length=4)
    """Shape of one input of a model that takes no tokens, such as `[3, 224, 224]` (channels,
    height, width); None means the model's own, and of a model file that it takes tokens."""
    predicts: Literal["class", "numbers"] | None = None
    """What a model file with an `input_shape` predicts of each input: one class, by cross-entropy,
    or numbers, by mean squared error; None means a class."""
    classes: Size | None = Field(default=None, ge=2)
    """Classes of a model of images."""
    patch: Size | None = None
    """Side of a vision transformer's patches, in pixels."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Probability that a value is dropped in training; None means the model's own."""
    split_blocks: bool | None = None
    """Makes attention and feed-forward separate layers, so that a stage may end between them; None
    means one layer per block."""
    sentence_head: bool | None = None
    """Adds a head beside that of masked tokens that says of a pair of sentences whether the second
    follows the first, as in BERT; None means the model's own."""
    experts: int | None = Field(default=None, ge=0, le=MAX_SIZE)
    """Experts of each feed-forward branch; 0 makes a model dense, None means the model's own."""
    experts_per_token: Size | None = None
    """Experts that each token takes."""
    expert_ffn: Size | None = None
    """Inner width of one expert."""
    shared_ffn: int | None = Field(default=None, ge=0, le=MAX_SIZE)
    """Inner width of the expert that all tokens take; 0 has none."""
    norm_topk: bool | None = None
    """Divides the weights of a token's experts by their sum."""
    capacity: float | None = Field(default=None, ge=0)
    """Most tokens that an expert takes of a sequence, as a multiple of an equal share; 0 drops no
    token."""
    balance_loss: float | None = Field(default=None, ge=0)
    """Factor of the loss that balances the experts of each sequence."""
    balance_bias: float | None = Field(default=None, ge=0)
    """How much the bias by which experts are chosen moves in a step; 0 has no bias."""
    expert_every: Size | None = None
    """One block of so many has experts."""
    dense_layers: int | None = Field(default=None, ge=0, le=MAX_LAYERS)
    """First blocks without experts."""
    sharding_rules: dict[str, str] | None = None
    """How to shard modules of a model file over tensor-parallel ranks, by pattern of their names:
    `region`, `column`, `row`, `vocabulary`, ...; None means the model's own rules."""
    arguments: dict[str, JsonValue] | None = None
    """Arguments of the function of a model file, by name. `model.NAME=...` sets one too, unless
    NAME is another key of this table; None gives it none but these keys."""

    @model_validator(mode="before")
    @classmethod
    def _other_keys_are_arguments(cls, table: object) -> object:
        """Takes the keys that a model file's function may know for its arguments."""
        if not (isinstance(table, dict) and is_users_own(str(table.get("name", "")))):
            return table
        others = {key: table[key] for key in table if key not in cls.model_fields}
        given = table.get("arguments") or {}
        if not others or not isinstance(given, dict):
            return table
        known = {key: table[key] for key in table if key not in others}
        return {**known, "arguments": {**given, **others}}

    @property
    def dials(self) -> dict[str, Any]:
        """What is said of the model beside its name, by key (`Any`: of any kind)."""
        fields = set(ModelRequest.model_fields) - {"name", "arguments"}
        return {**self.model_dump(include=fields, exclude_none=True), **(self.arguments or {})}
