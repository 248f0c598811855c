"""Request: what a user asks for. Everything has a default; what stays open, the planner decides."""

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
"""What is left of a running mean after each step."""


class ModelRequest(Document):
    """A model by name or file, with dials that change its size."""

    name: str = "gpt-tiny"
    """A name of the catalogue, or `file.py:function` that returns an `nn.Module`."""
    layers: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    ffn: int | None = Field(default=None, ge=1)
    vocabulary: int | None = Field(default=None, ge=2)
    """None: the model's own, which must hold the tokenizer's."""
    sequence: int | None = Field(default=None, ge=2)
    """Longest sequence of learned positions; None: the model's own."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    split_blocks: bool | None = None
    """Makes attention and feed-forward layers of their own, so that a stage may end between them;
    None: a block is one layer."""
    sharding_rules: dict[str, str] | None = None
    """How modules of a file's model are cut over slices, by pattern of their names: `region`,
    `column`, `row`, `vocabulary`, ...; None: as the model itself knows."""


class DataRequest(Document):
    """Where text comes from and how it becomes tokens."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's sources on this machine), a folder, a `.txt`,
    `.jsonl` or `.parquet` file, or a Hugging Face data set (`hf:name`, or a saved folder)."""
    text_field: str = "text"
    tokenizer: str = "bpe"
    """`byte`, `bpe` (trained on this corpus), or the path of a `tokenizer.json`."""
    vocabulary: int = Field(default=4096, ge=257)
    """Entries of a trained tokenizer."""
    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Share of documents that is never trained on."""
    limit_bytes: Bytes | None = None
    """Takes only so much text, in the corpus's order; None takes all."""


class TrainRequest(Document):
    """Optimisation: AdamW, warm-up and cosine, clipping by the global norm."""

    steps: int = Field(default=400, ge=1)
    batch: int = Field(default=16, ge=1)
    """Global batch in sequences."""
    sequence: int | None = Field(default=None, ge=2)
    """Tokens of one sequence; None: the longest that the model takes, at most 1024."""
    learning_rate: float = Field(default=1e-3, gt=0)
    final_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate that is left at the last step."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; None, which a file writes as `inf`, never clips."""
    seed: int = 0
    evaluate_every: int = Field(default=100, ge=1)
    evaluate_sequences: int = Field(default=64, ge=0)
    """0 never evaluates."""
    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)
    """Checkpoints that stay on disk."""
    hang_timeout_seconds: float | None = Field(default=None, gt=0)
    """Time without any progress after which a device of several counts as hanging; None: a minute,
    or ten predicted steps where that is longer."""

    @field_validator("clip")
    @classmethod
    def _infinity_never_clips(cls, clip: float | None) -> float | None:
        return None if clip == inf else clip

    @model_serializer(mode="wrap")
    def _with_clip(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes the clip also where it is None: left out, it would be read as the default."""
        content: dict[str, Any] = dump(self)
        return content | {"clip": inf} if self.clip is None else content


class ParallelRequest(Document):
    """Parallel degrees and the pipeline schedule to hold fixed."""

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
    """How many replicas share one copy; what is left open is 1."""

    parameters: int | None = Field(default=None, ge=1)
    optimizer: int | None = Field(default=None, ge=1)


class OffloadRequest(Document):
    """Tiers to hold fixed."""

    optimizer: str | None = None
    """Where optimizer state lives while weights stay near: `memory`, or a tier beyond it."""


class BatchRequest(Document):
    """Sizes to hold fixed."""

    micro: int | None = Field(default=None, ge=1)
    accumulation: int | None = Field(default=None, ge=1)


class Request(Document):
    """Model, machine, data, optimisation, and whatever of the plan is to be held fixed."""

    model: ModelRequest = ModelRequest()
    machine: str = "here"
    memory: Bytes | None = Field(default=None, gt=0)
    """Budget for the near tier; None: the machine's own capacity."""
    data: DataRequest = DataRequest()
    train: TrainRequest = TrainRequest()
    parallel: ParallelRequest = ParallelRequest()
    sharding: ShardingRequest = ShardingRequest()
    offload: OffloadRequest = OffloadRequest()
    batch: BatchRequest = BatchRequest()
    precision: Precision | None = None
    moments: MomentFormat = "float32"
    """How the optimizer's moments are kept. It changes the numbers, so search holds to it."""
    compile: bool | None = None
    recompute: Recompute | None = None
    recompute_layers: int | None = Field(default=None, ge=1)
    """Of how many layers of each stage that tells, the first ones; None: of all that can run again
    where `recompute` is named, else of as few as makes the plan fit."""
    phases: int | None = Field(default=None, ge=1)
    """In how many turns layers come into the near tier; 1: all stay there; None: as few as fit."""

    @model_validator(mode="after")
    def _counts_what_runs_again(self) -> Self:
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"`recompute_layers` = {self.recompute_layers} with `recompute` = none, which runs no layer "
                "again; leave one of them out"
            )
        return self
