"""Request: what a user asks for. All fields have defaults; the planner decides what is open."""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from math import inf
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from windlass.document import Synonyms
from windlass.schema.data_request import DataRequest
from windlass.schema.graph import Precision
from windlass.schema.model_request import LoraRequest, ModelRequest, Name, RequestTable, Size
from windlass.schema.optimizers import (
    LearningRateSchedule,
    OptimizerName,
    averaging_faults,
    optimizer_law,
    optimizer_settings,
    unread_settings,
)
from windlass.schema.plan import AttentionBackend, Loss, MomentFormat, PipelineSchedule, Recompute
from windlass.schema.sparsity import ModelIdentity, SparsityRequest
from windlass.schema.tensor_grid import TensorDegree
from windlass.units import Bytes

Decay = Annotated[float, Field(ge=0, lt=1)]
"""The share of a running mean that remains after each step."""

Count = Annotated[int, Field(ge=1, le=2**40)]
"""A degree, or a number of steps."""
Sequences = Annotated[int, Field(ge=1, le=2**20)]
"""Sequences or micro-batches of one step, each of which is planned and predicted."""


def _require_rising(text: str) -> str:
    first, _, last = text.partition("-")
    if last and int(last) < int(first):
        raise ValueError(f"`{text}` ends before it begins; write `{last}-{first}`")
    return text


BatchRange = Annotated[
    str, Field(pattern=r"^[1-9]\d{0,11}(-[1-9]\d{0,11})?$"), AfterValidator(_require_rising)
]
"""A number of a batch, or the first and the last one of some, such as `120-125`."""

_DECAY = 0.2
_FINAL_RATE = 0.1


class ParameterGroup(RequestTable):
    """Weights that have a learning rate or a weight decay of their own."""

    pattern: Name
    """Pattern of their full names, such as `*.bias`; the first group that matches counts."""
    rate_factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Their learning rate in each step, as a share of that of other weights."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Their weight decay, whatever their dimensions; None means that of other weights."""


class TrainRequest(RequestTable):
    """Training: an optimizer, a learning-rate schedule, clipping by the global gradient norm."""

    steps: Count | None = None
    """Steps of the run; None means a default for model and machine, as for the next two."""
    batch: Sequences | None = None
    """Global batch in sequences."""
    sequence: Size | None = None
    """Tokens per sequence; images have as many positions as their model mixes."""
    optimizer: OptimizerName = "adamw"
    """The optimizer. Those of its settings that are None have its published defaults."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate at the end of the warm-up; None means the published one of the optimizer and of
    a model of this size and family."""
    schedule: LearningRateSchedule | None = None
    """Shape of the learning rate after the warm-up: `cosine`, `linear`, `wsd` (stable, then a
    linear decay), `constant` or `inverse_sqrt`; None means `constant` for schedule-free AdamW and
    `cosine` for others."""
    final_rate: float = Field(default=_FINAL_RATE, ge=0, le=1)
    """Learning rate at the last step, as a share of `learning_rate`; `constant` and `inverse_sqrt`
    have none."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    decay: float = Field(default=_DECAY, gt=0, le=1)
    """Share of the steps over which `wsd` falls, the last ones."""
    betas: tuple[Decay, Decay] | None = None
    """Decay of the first and of the second moment: AdamW's, or the two of Lion's one moment."""
    momentum: Decay | None = None
    """Share of SGD's or Muon's moment that remains after each step."""
    nesterov: bool | None = None
    """Whether SGD or Muon adds the gradient once more, ahead of its moment."""
    epsilon: float | None = Field(default=None, gt=0)
    """AdamW's epsilon, beside the root of the second moment; half the width of Lion's sign."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay, of weights with two or more dimensions; SGD adds it to the gradient."""
    ema: Decay | None = None
    """Share of an average of the weights that remains after each step (EMA), such as 0.999; the
    average is evaluated beside them. None keeps none."""
    groups: tuple[ParameterGroup, ...] = ()
    """Weights that have a learning rate or a weight decay of their own."""
    clip: float | None = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Largest global gradient norm; None never clips, and is `inf` in a file."""
    z_loss: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Factor of the mean of `log^2 Z`, the softmax's normaliser, whose gradient is added to that of
    the loss, such as 1e-4; None adds none. The loss that is shown is without it."""
    loss_scale: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Factor of the loss in float16, so that small gradients are not 0; None adapts it."""
    frozen: tuple[Name, ...] | None = None
    """Patterns of the names of weights that are never updated, such as `embedding.*`; None freezes
    none."""
    skip_batches: tuple[BatchRange, ...] | None = None
    """Batches that are left out, such as `120` or `120-125`; the later ones move up. A batch has
    the number of the step that would take it if none were left out."""
    seed: int = 0
    """Seed of the weights, of dropout and of the order of the text."""
    evaluate_every: Count = 100
    """Steps from one evaluation on held-out text to the next; the last step has one too."""
    evaluate_sequences: int = Field(default=64, ge=0)
    """Sequences in one evaluation; 0 never evaluates."""
    tasks: tuple[Name, ...] | None = None
    """TOML files of tasks that are scored during training; None scores none."""
    evaluate_tasks_every: Count | None = None
    """Steps from one score of the tasks to the next; None means `evaluate_every`."""
    save_every: Count = 100
    """Steps from one checkpoint to the next; the last step has one too."""
    keep: Count = 2
    """Number of checkpoints that are kept on disk."""
    hang_timeout_seconds: float | None = Field(default=None, gt=0)
    """Time without progress after which a rank counts as hanging; None means a minute, or ten
    predicted steps if that is longer."""

    @model_validator(mode="after")
    def _schedule_settings_agree(self) -> Self:
        errors: list[str] = []
        schedule = self.schedule or optimizer_law(self.optimizer).schedule
        if schedule in ("constant", "inverse_sqrt") and self.final_rate != _FINAL_RATE:
            errors.append(
                f"`final_rate` = {self.final_rate:g} with `schedule` = {schedule}, which "
                "falls to no final rate; leave it out, or take `linear`, `cosine` or `wsd`"
            )
        if schedule != "wsd" and self.decay != _DECAY:
            errors.append(
                f"`decay` = {self.decay:g} with `schedule` = {schedule}: only `wsd` has steps "
                "of decay; leave it out, or set `schedule` = wsd"
            )
        if schedule == "wsd" and self.warmup + self.decay > 1:
            errors.append(
                f"`warmup` = {self.warmup:g} and `decay` = {self.decay:g} are more than all steps; "
                f"lower `decay` to {1 - self.warmup:g} or less"
            )
        errors += averaging_faults(self.optimizer, self.betas, self.ema)
        errors += self._unread_settings()
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def _unread_settings(self) -> Iterator[str]:
        """Settings that the optimizer does not read, a sentence each."""
        return unread_settings(self.optimizer, dict(self))

    @field_validator("skip_batches", mode="before")
    @classmethod
    def _one_range_needs_no_list(cls, value: object) -> object:
        if isinstance(value, str):
            # `6-7,9` on the command line is no TOML list.
            value = [text.strip() for text in value.strip("[]").split(",")]
        ranges = value if isinstance(value, list | tuple) or value is None else [value]
        return ranges and tuple(str(text) if type(text) is int else text for text in ranges)

    @field_validator("tasks", mode="before")
    @classmethod
    def _one_task_needs_no_list(cls, value: object) -> object:
        if isinstance(value, str):
            # `one.toml,two.toml` on the command line is no TOML list.
            return tuple(text.strip() for text in value.strip("[]").split(","))
        return value

    @field_validator("clip")
    @classmethod
    def _infinity_never_clips(cls, clip: float | None) -> float | None:
        return None if clip == inf else clip

    @model_serializer(mode="wrap")
    def _with_clip(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes `clip` even if it is None: left out, it would be read as the default."""
        content: dict[str, Any] = dump(self)
        return content | {"clip": inf} if self.clip is None else content


class TrainSettings(TrainRequest):
    """Training with every default chosen."""

    steps: Count
    batch: Sequences
    sequence: Size
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: LearningRateSchedule
    betas: tuple[Decay, Decay]
    momentum: Decay
    nesterov: bool
    epsilon: float = Field(gt=0)
    weight_decay: float = Field(ge=0)

    @model_validator(mode="before")
    @classmethod
    def _with_optimizer_defaults(cls, content: Any) -> Any:  # noqa: ANN401  of any form so far
        """Fills in what the optimizer's law says, and AdamW's values for what it does not read."""
        if not isinstance(content, dict) or content.get("optimizer", "adamw") not in _OPTIMIZERS:
            return content
        defaults = optimizer_settings(content.get("optimizer", "adamw"))
        return content | {key: defaults[key] for key in defaults if content.get(key) is None}

    def _unread_settings(self) -> Iterator[str]:
        """Nothing: all settings have values here, also those that the optimizer does not read."""
        return iter(())


_OPTIMIZERS = get_args(OptimizerName)


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


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@cache
def _synonyms() -> Synonyms:
    text = files("windlass.schema").joinpath("synonyms.toml").read_text(encoding="utf-8")
    return Synonyms(**tomllib.loads(text))
