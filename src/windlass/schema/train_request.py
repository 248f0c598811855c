"""TrainRequest: steps, optimizer, schedule, evaluation and checkpoints that a user asks for."""

from collections.abc import Iterator
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

from windlass.schema.model_request import Name, RequestTable, Size
from windlass.schema.optimizers import (
    LearningRateSchedule,
    OptimizerName,
    averaging_faults,
    optimizer_law,
    optimizer_settings,
    unread_settings,
)

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
    """AdamW's, beside the root of the second moment; half the width of Lion's sign; what Adafactor
    adds to squares."""
    relative_step: bool | None = None
    """Whether Adafactor's steps go with the size of a weight and one over the root of the step."""
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
    """Tasks that are scored during training: names in the library of lm-evaluation-harness, or YAML
    files of its form; None scores none."""
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
            # `one.yaml,two.yaml` on the command line is no TOML list.
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
    relative_step: bool
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
