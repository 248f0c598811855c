"""Request: what a user asks for. All fields have defaults; the planner decides what is open."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Self

from pydantic import Field, field_validator, model_validator

from windlass.document import Synonyms
from windlass.schema.data_request import DataRequest
from windlass.schema.graph import Precision
from windlass.schema.model_request import LoraRequest, ModelRequest, Name, RequestTable
from windlass.schema.plan import AttentionBackend, Loss, MomentFormat, PipelineSchedule, Recompute
from windlass.schema.sparsity import ModelIdentity, SparsityRequest
from windlass.schema.tensor_grid import TensorDegree
from windlass.schema.train_request import Count, Sequences, TrainRequest, TrainSettings
from windlass.units import Bytes


class ParallelRequest(RequestTable):
    """Parallel degrees and pipeline schedule; the planner decides those that are None."""

    pipeline: Count | None = None
    """Pipeline-parallel degree."""
    tensor: TensorDegree | None = None
    """Tensor-parallel degree: a number, or a grid such as `8x8`."""
    data: Count | None = None
    """Data-parallel degree."""
    context: Count | None = None
    """Context-parallel degree: ranks that divide each sequence among them."""
    expert: Count | None = None
    """Expert-parallel degree: replicas that divide the experts among them, a divisor of `data`."""
    schedule: PipelineSchedule | None = None
    """Pipeline schedule."""
    virtual_stages: Count | None = None
    """Model chunks on each pipeline rank; with more than 1 the schedule is `interleaved`."""


class ShardingRequest(RequestTable):
    """Sharding degrees; None means 1."""

    parameters: Count | None = None
    """Sharding degree of parameters (FSDP, ZeRO-3)."""
    optimizer: Count | None = None
    """Sharding degree of optimizer state (ZeRO-1)."""
    reshard: bool | None = None
    """Whether full parameters are freed after each pass and gathered again for the next (FSDP's
    `reshard_after_forward`)."""


class OffloadRequest(RequestTable):
    """Memory tiers; the planner decides those that are None."""

    optimizer: str | None = None
    """Tier of the optimizer state while weights stay in device memory: `device` or an offload
    tier."""


class BatchRequest(RequestTable):
    """Batch sizes; the planner decides those that are None."""

    micro: Sequences | None = None
    """Micro-batch size in sequences."""
    accumulation: Sequences | None = None
    """Number of micro-batches in a step."""


class Request(RequestTable):
    """Model, machine, data, training, and the parts of the plan that the user fixes."""

    model: ModelRequest = ModelRequest()
    sparsity: SparsityRequest | None = None
    """Weights that are absent; None keeps all."""
    lora: LoraRequest | None = None
    """Trains low-rank adapters beside linear layers, all other weights frozen; None trains the
    weights themselves."""
    machine: Name = "here"
    """A name that `windlass machines` lists, `NAME:N` for N hosts of a family, or a `.toml` file
    of your own."""
    stack: Name | None = None
    """Software whose run is planned and predicted: a name that `windlass stacks` lists, or a
    `.toml` file of your own; None means Windlass's own runtime."""
    memory: Bytes | None = Field(default=None, gt=0)
    """Budget of device memory, such as `4GiB`; None means the machine's capacity."""
    margin: float = Field(default=0.05, ge=0, lt=1)
    """What a plan must bear to be chosen, as a share or such as `5%`: this much of the machine's
    device memory stays free at the upper end of the peak's interval (a `memory` that is named may
    be filled to that end), and links this much slower do not make another one faster. 0 chooses the
    proved fastest plan."""
    data: DataRequest = DataRequest()
    train: TrainRequest = TrainRequest()
    parallel: ParallelRequest = ParallelRequest()
    sharding: ShardingRequest = ShardingRequest()
    offload: OffloadRequest = OffloadRequest()
    batch: BatchRequest = BatchRequest()
    precision: Precision | None = None
    """Number format of activations and matrix products; masters and moments are float32."""
    moments: MomentFormat = "float32"
    """Storage format of the optimizer's moments. It affects results, so planning keeps it."""
    master_weights: bool = True
    """Keep float32 master weights beside bfloat16 ones; false updates these themselves, with
    stochastic rounding. It affects results, so planning keeps it."""
    compile: bool | None = None
    """Compile the layers with torch.compile."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a run on the same devices gives the same bits. It is
    slower on a GPU; planning never chooses it."""
    step_graph: bool | None = None
    """Record the work of a step once and replay it as a whole (CUDA graphs), on one CUDA device.
    Planning never chooses it: no GPU has run it. None leaves it to a plan file."""
    recompute: Recompute | None = None
    """Activation checkpointing: recompute nothing, all but the large matrix products, or whole
    layers in the backward pass."""
    recompute_layers: int | tuple[int, ...] | None = None
    """Number of recomputed layers in each stage, the first ones, at least 1; or one number for each
    pipeline stage, where 0 recomputes none. None means all that can be recomputed if `recompute` is
    set, else as few as make the plan fit."""
    loss: Loss | None = None
    """How the last layer computes its loss: `plain` from all logits at once, or `fused` with the
    projection to the vocabulary, some tokens at a time, so that the logits never exist whole. None
    means what is predicted faster where logits take much of the memory, else `plain`."""
    attention: AttentionBackend | None = None
    """How attention is computed: `flash` by torch's fused kernel, `math` by matrix products with a
    softmax between them, `cudnn` or `efficient` by those kernels of CUDA devices. None means what
    is predicted faster by what this machine's probe measured, else `flash`."""
    phases: Count | None = None
    """Number of phases in which layers take turns in device memory; 1 keeps all layers there, None
    means as few as fit."""

    @classmethod
    def synonyms(cls) -> Synonyms:
        """Words of other software for keys and values of a request."""
        return _synonyms()

    @property
    def model_identity(self) -> ModelIdentity:
        """The model with its sparsity, adapters and frozen weights: all that decides its layers."""
        fields = {name: getattr(self.model, name) for name in self.model.model_fields_set}
        parts = {"sparsity": self.sparsity, "lora": self.lora, "frozen": self.train.frozen}
        fields |= {name: part for name, part in parts.items() if part is not None}
        return ModelIdentity.model_validate(fields)

    @field_validator("margin", mode="before")
    @classmethod
    def _margin_may_be_percent(cls, margin: object) -> object:
        percent = margin.strip().removesuffix("%") if isinstance(margin, str) else margin
        try:
            return margin if percent == margin else float(str(percent)) / 100
        except ValueError:
            return margin

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
    def _adapters_agree(self) -> Self:
        if self.lora is not None and self.train.frozen is not None:
            raise ValueError(
                "`train.frozen` with `lora`, which freezes all weights but the adapters'; leave "
                "one of them out"
            )
        if self.lora is not None and self.sparsity is not None:
            raise ValueError(
                "`lora` with `sparsity`: adapters stand beside dense layers only; leave one of "
                "them out"
            )
        return self

    @model_validator(mode="after")
    def _recompute_settings_agree(self) -> Self:
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"`recompute_layers` = {self.recompute_layers} with `recompute` = none, which "
                "recomputes no layer; leave one of them out"
            )
        return self


class ResolvedRequest(Request):
    """A request with the defaults that depend on model and machine; a run folder holds this one."""

    train: TrainSettings


def meant_sizes(word: str) -> frozenset[str]:
    """The sizes of a model that a word means: `n_embd` and `d_model` mean the `width`."""
    keys = (key.rpartition(".") for key in Request.meant_keys(word))
    return frozenset(key for table, _, key in keys if table == "model" or key == "sequence")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@cache
def _synonyms() -> Synonyms:
    text = files("windlass.schema").joinpath("synonyms.toml").read_text(encoding="utf-8")
    return Synonyms(**tomllib.loads(text))
