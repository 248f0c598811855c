"""Request: what a user asks for. All fields have defaults; the planner decides what is open."""

from math import inf
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat, PipelineSchedule, Recompute
from windlass.schema.tensor_grid import TensorDegree
from windlass.units import Bytes

Decay = Annotated[float, Field(ge=0, lt=1)]
"""The share of a running mean that remains after each step."""


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


class DataRequest(Document):
    """The text to train on and how it is tokenized."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's sources on this machine), a folder, a `.txt`,
    `.jsonl` or `.parquet` file, or a Hugging Face data set (`hf:name`, or a saved folder)."""
    text_field: str = "text"
    tokenizer: str = "bpe"
    """`byte`, `bpe` (trained on this corpus), or the path of a `tokenizer.json`."""
    vocabulary: int = Field(default=4096, ge=257)
    """Entries of a trained tokenizer."""
    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Share of documents that is kept for evaluation and never trained on."""
    limit_bytes: Bytes | None = None
    """Most bytes of text to take, in the order of the corpus; None takes all."""


class TrainRequest(Document):
    """Training with AdamW: warm-up and cosine decay, clipping by the global gradient norm."""

    steps: int = Field(default=400, ge=1)
    batch: int = Field(default=16, ge=1)
    """Global batch in sequences."""
    sequence: int | None = Field(default=None, ge=2)
    """Tokens per sequence; None means the longest that the model takes, at most 1024."""
    learning_rate: float = Field(default=1e-3, gt=0)
    final_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of `learning_rate`."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; None never clips, and is `inf` in a file."""
    seed: int = 0
    evaluate_every: int = Field(default=100, ge=1)
    evaluate_sequences: int = Field(default=64, ge=0)
    """Sequences in one evaluation; 0 never evaluates."""
    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints that are kept on disk."""
    hang_timeout_seconds: float | None = Field(default=None, gt=0)
    """Time without progress after which a rank counts as hanging; None means a minute, or ten
    predicted steps if that is longer."""

    @field_validator("clip")
    @classmethod
    def _infinity_never_clips(cls, clip: float | None) -> float | None:
        return None if clip == inf else clip

    @model_serializer(mode="wrap")
    def _with_clip(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes `clip` even if it is None: left out, it would be read as the default."""
        content: dict[str, Any] = dump(self)
        return content | {"clip": inf} if self.clip is None else content


class ParallelRequest(Document):
    """Parallel degrees and pipeline schedule; the planner decides those that are None."""

    pipeline: int | None = Field(default=None, ge=1)
    """Pipeline-parallel degree."""
    tensor: TensorDegree | None = None
    """Tensor-parallel degree: a number, or a grid such as `8x8`."""
    data: int | None = Field(default=None, ge=1)
    """Data-parallel degree."""
    schedule: PipelineSchedule | None = None
    virtual_stages: int | None = Field(default=None, ge=1)
    """Model chunks on each pipeline rank; with more than 1 the schedule is `interleaved`."""


class ShardingRequest(Document):
    """Sharding degrees; None means 1."""

    parameters: int | None = Field(default=None, ge=1)
    """Sharding degree of parameters (FSDP, ZeRO-3)."""
    optimizer: int | None = Field(default=None, ge=1)
    """Sharding degree of optimizer state (ZeRO-1)."""


class OffloadRequest(Document):
    """Memory tiers; the planner decides those that are None."""

    optimizer: str | None = None
    """Tier of the optimizer state while weights stay in device memory: `device` or an offload
    tier."""


class BatchRequest(Document):
    """Batch sizes; the planner decides those that are None."""

    micro: int | None = Field(default=None, ge=1)
    """Micro-batch size in sequences."""
    accumulation: int | None = Field(default=None, ge=1)
    """Number of micro-batches in a step."""


class Request(Document):
    """Model, machine, data, training, and the parts of the plan that the user fixes."""

    model: ModelRequest = ModelRequest()
    machine: str = "here"
    memory: Bytes | None = Field(default=None, gt=0)
    """Budget of device memory in bytes; None means the machine's capacity."""
    data: DataRequest = DataRequest()
    train: TrainRequest = TrainRequest()
    parallel: ParallelRequest = ParallelRequest()
    sharding: ShardingRequest = ShardingRequest()
    offload: OffloadRequest = OffloadRequest()
    batch: BatchRequest = BatchRequest()
    precision: Precision | None = None
    moments: MomentFormat = "float32"
    """Storage format of the optimizer's moments. It affects results, so planning keeps it."""
    compile: bool | None = None
    recompute: Recompute | None = None
    recompute_layers: int | tuple[int, ...] | None = None
    """Number of recomputed layers in each stage, the first ones, at least 1; or one number for each
    pipeline stage, where 0 recomputes none. None means all that can be recomputed if `recompute` is
    set, else as few as make the plan fit."""
    phases: int | None = Field(default=None, ge=1)
    """Number of phases in which layers take turns in device memory; 1 keeps all layers there, None
    means as few as fit."""

    @field_validator("recompute_layers", mode="before")
    @classmethod
    def _recompute_layers_are_counts(cls, layers: object) -> object:
        counts = layers if isinstance(layers, list | tuple) else [layers]
        least = 1 if counts is not layers else 0
        if layers is not None and not (counts and all(_is_count(each, least) for each in counts)):
            raise ValueError(
                "input should be a number of layers, at least 1, or a list with a number for each "
                "pipeline stage, such as [1, 0, 1]"
            )
        return layers

    @model_validator(mode="after")
    def _recompute_settings_agree(self) -> Self:
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"`recompute_layers` = {self.recompute_layers} with `recompute` = none, which "
                "recomputes no layer; leave one of them out"
            )
        return self


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
