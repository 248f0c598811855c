"""Plan: the one artifact. How a graph is cut over a machine, complete and immutable."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from windlass.document import Document
from windlass.schema.graph import PRECISION_BYTES, Precision
from windlass.schema.tensor_grid import TensorDegree

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]
"""`full`: keep only a layer's input, run its forward again right before its backward. `selective`:
keep what its large products give, and run the rest again as its backward begins."""

OffloadClass = Literal["parameters", "gradients", "optimizer", "activations"]
"""What a plan gives a home to."""

MomentFormat = Literal["float32", "bfloat16", "int8"]
"""How the optimizer's two moments of each weight are kept between updates. The update itself is in
float32. `int8`: 8-bit codes, and one float32 scale for each block of `MOMENT_BLOCK` elements."""

MOMENT_BLOCK = 256
"""Elements of one weight that share a scale, as in torchao's 8-bit AdamW. Blocks keep one outlier
from spoiling a whole weight. Source: Dettmers et al. 2021, arXiv:2110.02861, with 2048."""

_MOMENT_BYTES: dict[MomentFormat, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = 4

DEVICE_TIER = "device"
"""The tier that layers compute in; every other one is far."""


HOST_TIER = "host"
"""The far tier that is memory of the host, pinned where an accelerator copies from it; every other
far tier is files under the run's folder."""


class Parallelism(Document):
    """Parallel degrees: `pipeline * tensor * data` devices, and the pipeline's schedule."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline-parallel degree p."""
    tensor: TensorDegree = 1
    """Tensor-parallel degree t: a number, or rows x columns such as `8x8`."""
    data: int = Field(default=1, ge=1)
    """Data-parallel degree r: replicas of the model."""
    schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = Field(default=1, ge=1)
    """Model chunks on each pipeline rank (Megatron's VPP); the `interleaved` schedule runs them in
    turn."""

    @property
    def devices(self) -> int:
        """How many devices the cut takes."""
        return self.pipeline * self.tensor * self.data


class ShardingDegrees(Document):
    """How many replicas share one copy (replicated tensor sharding)."""

    parameters: int = Field(default=1, ge=1)
    optimizer: int = Field(default=1, ge=1)


class Offload(Document):
    """The tier where each class of tensor lives between uses."""

    parameters: str = DEVICE_TIER
    gradients: str = DEVICE_TIER
    optimizer: str = DEVICE_TIER
    activations: str = DEVICE_TIER


class Batch(Document):
    """What one replica takes in one step, counted in sequences of `sequence` tokens."""

    sequence: int = Field(ge=1)
    micro: int = Field(ge=1)
    accumulation: int = Field(default=1, ge=1)

    @property
    def sequences_per_replica(self) -> int:
        """Sequences of one replica in one step."""
        return self.micro * self.accumulation


class Stage(Document):
    """Consecutive layers on one device of a pipeline; with `Plan.interleave`, one chunk of it."""

    phases: tuple[tuple[int, int], ...] = Field(min_length=1)
    """Half-open ranges of layers that are in the near tier together, in turn."""
    recompute: Recompute = "none"
    recompute_layers: int | None = Field(default=None, ge=1)
    """Of how many layers `recompute` tells, the first ones; None: of all that can run again."""
    recompute_rest: Literal["selective"] | None = None
    """How those behind them are recomputed; None: not at all."""

    @model_validator(mode="after")
    def _counts_what_runs_again(self) -> Self:
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"`recompute_layers` = {self.recompute_layers} with `recompute` = none, which runs no layer "
                "again; set `recompute` = full or leave `recompute_layers` out"
            )
        if self.recompute_rest is not None and (
            self.recompute != "full" or self.recompute_layers is None
        ):
            raise ValueError(
                f"`recompute_rest` = {self.recompute_rest} without `recompute` = full and a `recompute_layers`, behind "
                "which there is a rest; name both, or set `recompute` = selective"
            )
        return self

    @property
    def first_layer(self) -> int:
        """Index of the first layer."""
        return self.phases[0][0]

    @property
    def end_layer(self) -> int:
        """One past the index of the last layer."""
        return self.phases[-1][1]


class Plan(Document):
    """A cut, what lives where, what is computed twice, and in which order."""

    graph: str
    """`name@fingerprint` of the graph."""
    machine: str
    """`name@fingerprint` of the machine."""
    precision: Precision = "float32"
    moments: MomentFormat = "float32"
    """In which format the optimizer's moments are kept; never chosen by search."""
    compile: bool = False
    clip: bool = True
    """Whether the step needs the global gradient norm before it updates."""
    parallel: Parallelism = Parallelism()
    sharding: ShardingDegrees = ShardingDegrees()
    offload: Offload = Offload()
    batch: Batch
    stages: tuple[Stage, ...] = Field(min_length=1)
    """In the order of the chain; of p devices the `k`th is on device `k mod p`."""

    @model_validator(mode="after")
    def _stages_follow_each_other(self) -> Self:
        due = self.parallel.pipeline * self.parallel.virtual_stages
        if len(self.stages) != due:
            chunks = (
                f" x `parallel.virtual_stages` = {self.parallel.virtual_stages}"
                if self.parallel.virtual_stages > 1
                else ""
            )
            raise ValueError(
                f"{len(self.stages)} stages for `parallel.pipeline` = {self.parallel.pipeline}{chunks}; "
                "write one `[[stages]]` for each"
            )
        end = 0
        for index, stage in enumerate(self.stages):
            for first, last in stage.phases:
                if first != end or last <= first:
                    raise ValueError(
                        f"stage {index} has phase [{first}, {last}) where one from {end} is due"
                    )
                end = last
        return self

    @property
    def global_batch(self) -> int:
        """Sequences of one step over all replicas."""
        return self.batch.sequences_per_replica * self.parallel.data

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all replicas."""
        return self.global_batch * self.batch.sequence

    @property
    def offload_tiers(self) -> dict[OffloadClass, str]:
        """The tier of each class that does not stay in the near one."""
        homes: dict[OffloadClass, str] = {
            "parameters": self.offload.parameters,
            "gradients": self.offload.gradients,
            "optimizer": self.offload.optimizer,
            "activations": self.offload.activations,
        }
        return {name: tier for name, tier in homes.items() if tier != DEVICE_TIER}

    def is_offloaded(self, name: OffloadClass) -> bool:
        """Whether a class lives outside the near tier between uses."""
        return name in self.offload_tiers

    @property
    def offloads(self) -> bool:
        """Whether anything moves between tiers within a step."""
        return bool(self.offload_tiers)

    @property
    def defers_updates(self) -> bool:
        """Whether a layer's update waits for its next fetch, in the next step.

        The global norm is known only after the whole backward pass, when the gradients of all
        phases but the first have gone home. So they wait there together with the optimizer state.
        """
        return self.clip and self.is_offloaded("gradients")

    @property
    def recompute(self) -> Recompute:
        """The most that any stage computes twice."""
        known: tuple[Recompute, ...] = get_args(Recompute)
        return max((stage.recompute for stage in self.stages), key=known.index)

    @property
    def label(self) -> str:
        """Twelve digits that name this plan."""
        return self.fingerprint()

    @property
    def parameter_itemsize(self) -> int:
        """Bytes a parameter of what layers compute with."""
        return PRECISION_BYTES[self.precision]

    @property
    def has_master_weights(self) -> bool:
        """Whether layers compute with copies of float32 masters."""
        return self.precision == "bfloat16"

    def moment_bytes(self, elements: int) -> int:
        """Bytes of both moments of one weight: `2 n` numbers and, in 8 bits, their scales.

        With scales it is `2 n + 2 * 4 * ceil(n / 256)`, 2.03 bytes a parameter.

        Args:
            elements: n, of the weight.
        """
        scales = -(-elements // MOMENT_BLOCK) if self.moments == "int8" else 0
        wider = 2 if self.precision == "float64" else 1
        return 2 * (wider * _MOMENT_BYTES[self.moments] * elements + _SCALE_BYTES * scales)

    def state_bytes(self, elements: int) -> int:
        """Bytes of one weight that only the update touches: moments, and the master if apart."""
        return self.moment_bytes(elements) + (4 * elements if self.has_master_weights else 0)

    @property
    def optimizer_bytes_per_parameter(self) -> float:
        """The same for each parameter of a large weight."""
        return self.state_bytes(MOMENT_BLOCK) / MOMENT_BLOCK

    @property
    def gradient_itemsize(self) -> int:
        """Bytes a parameter of the gradient: a sum is at least in float32."""
        return max(4, self.parameter_itemsize) if self.batch.accumulation > 1 else self.parameter_itemsize
