"""Plan: how a graph is parallelized, sharded, offloaded and recomputed on a machine; immutable."""

from html import escape
from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from windlass.document import Document
from windlass.schema.graph import PRECISION_BYTES, OtherAttention, Precision
from windlass.schema.optimizers import OtherOptimizer, optimizer_law
from windlass.schema.sparsity import ModelIdentity
from windlass.schema.tensor_grid import TensorDegree

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]
"""Activation checkpointing of a layer. `full` saves only the layer's input and runs its forward
again right before its backward. `selective` saves the outputs of large matrix products, and
recomputes the rest as its backward begins."""

Loss = Literal["plain", "fused"]
"""How the last layer computes the mean cross-entropy. `plain`: from all logits of a micro-batch at
once. `fused` with the projection to the vocabulary: some tokens at a time, so that the logits never
exist whole."""

AttentionBackend = Literal["flash", OtherAttention]
"""How attention is computed. `flash`: by the fused kernel that torch prefers, which keeps no
probabilities; or one of the others."""

VOCABULARY_MULTIPLE = 64
"""Entries to a multiple of which accelerators pad the last projection's outputs, in each pass."""

OffloadClass = Literal["parameters", "gradients", "optimizer", "activations"]
"""The classes of tensors that a plan can offload."""

MomentFormat = Literal["float32", "bfloat16", "int8"]
"""Storage format of the optimizer's moments between updates; the update itself is in float32.
`int8`: 8-bit codes, and one float32 scale for each block of `MOMENT_BLOCK` elements."""

MOMENT_BLOCK = 256
"""Elements of one weight that share a scale, as in torchao's 8-bit AdamW. Blocks keep one outlier
from spoiling a whole weight. Source: Dettmers et al. 2021, arXiv:2110.02861, with 2048."""

_MOMENT_BYTES: dict[MomentFormat, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = 4

DEVICE_TIER = "device"
"""Name of the memory tier that layers compute in; all others are offload tiers."""


HOST_TIER = "host"
"""Name of the offload tier in host memory, pinned where an accelerator copies from it. All other
offload tiers are files under the run's folder."""


CONTEXT_RUNS = 2
"""Runs of adjacent tokens that a context-parallel rank has of a sequence, an early and a late one,
so that under a causal mask all ranks attend to equally many tokens."""


class Parallelism(Document):
    """Parallel degrees, `pipeline * tensor * data` devices, and the pipeline schedule."""

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
    context: int | None = Field(default=None, ge=2)
    """Context-parallel degree: ranks that divide each sequence among them; None means 1."""
    expert: int | None = Field(default=None, ge=2)
    """Expert-parallel degree e, a divisor of `data`: replicas that divide the experts of each layer
    among them; None means 1."""

    @property
    def devices(self) -> int:
        """Number of devices that the degrees take."""
        return self.pipeline * self.tensor * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters unless they shard them: data times context."""
        return self.data * (self.context or 1)

    @property
    def expert_degree(self) -> int:
        """Expert-parallel degree, 1 if experts are not divided."""
        return self.expert or 1


class ShardingDegrees(Document):
    """How many data-parallel replicas share one copy (replicated tensor sharding)."""

    parameters: int = Field(default=1, ge=1)
    """Sharding degree of parameters (FSDP, ZeRO-3); 1 replicates them."""
    optimizer: int = Field(default=1, ge=1)
    """Sharding degree of optimizer state and gradients (ZeRO-1); 1 replicates them."""
    reshard: Literal[True] | None = None
    """Whether full parameters are freed after each pass and gathered again for the next, beside the
    passes (FSDP's `reshard_after_forward`); None gathers them once a step."""


class Offload(Document):
    """The memory tier where each class of tensors is between uses."""

    parameters: str = DEVICE_TIER
    gradients: str = DEVICE_TIER
    optimizer: str = DEVICE_TIER
    activations: str = DEVICE_TIER


class Batch(Document):
    """The batch of one replica in one step, in sequences of `sequence` tokens."""

    sequence: int = Field(ge=1)
    """Sequence length in tokens."""
    micro: int = Field(ge=1)
    """Micro-batch size in sequences."""
    accumulation: int = Field(default=1, ge=1)
    """Number of micro-batches in a step."""

    @property
    def sequences_per_replica(self) -> int:
        """Sequences of one replica in one step."""
        return self.micro * self.accumulation


class Stage(Document):
    """Consecutive layers on one pipeline rank; with virtual stages, one of its model chunks."""

    phases: tuple[tuple[int, int], ...] = Field(min_length=1)
    """Half-open ranges of layers; with offloaded parameters the layers of one phase are in device
    memory together, one phase after the other."""
    recompute: Recompute = "none"
    recompute_layers: int | None = Field(default=None, ge=1)
    """Number of layers that `recompute` applies to, the first ones; None means all that can be
    recomputed."""
    recompute_rest: Literal["selective"] | None = None
    """How the layers after those are recomputed; None means not at all."""

    @model_validator(mode="after")
    def _recompute_settings_agree(self) -> Self:
        if self.recompute_layers is not None and self.recompute == "none":
            raise ValueError(
                f"`recompute_layers` = {self.recompute_layers} with `recompute` = none, which "
                "recomputes no layer; set `recompute` = full or leave `recompute_layers` out"
            )
        if self.recompute_rest is not None and (
            self.recompute != "full" or self.recompute_layers is None
        ):
            raise ValueError(
                f"`recompute_rest` = {self.recompute_rest} without `recompute` = full and a "
                "`recompute_layers` that leaves a rest; set both, or set `recompute` = selective"
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
    """A complete parallelization plan: degrees, sharding, offloading, recomputation, schedule."""

    # `graph` identifies the model; how it was asked for makes no other plan.
    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"model"})

    graph: str
    """`name@fingerprint` of the graph."""
    machine: str
    """`name@fingerprint` of the machine."""
    stack: str | None = None
    """Name of the software stack that it is for; None means Windlass's own runtime."""
    model: ModelIdentity | None = None
    """The model that `graph` was captured from, with its dials and its sparsity; None means the one
    that `graph` names, without any."""
    precision: Precision = "float32"
    optimizer: OtherOptimizer | None = None
    """Optimizer that the request names; None means AdamW. Planning never chooses it."""
    moments: MomentFormat = "float32"
    """Storage format of the optimizer's moments; planning never chooses it."""
    master_weights: Literal[False] | None = None
    """Whether layers compute with copies of float32 master weights in bfloat16 and float16; False
    updates bfloat16 weights themselves, with stochastic rounding. Planning never chooses it."""
    ema: float | None = Field(default=None, ge=0, lt=1)
    """Share that remains after each step of an average of the weights, kept in float32 beside them;
    None keeps none. Planning never chooses it."""
    compile: bool = False
    """Whether layers run as compiled code."""
    clip: bool = True
    """Whether the step needs the global gradient norm before it updates."""
    deterministic: Literal[True] | None = None
    """Whether an operation without a deterministic kernel is an error, so that a run on the same
    devices gives the same bits; None means that torch's fastest kernels run."""
    step_graph: Literal[True] | None = None
    """Whether the work of a step is recorded once and replayed as a whole (CUDA graphs), so that
    the host launches nothing kernel by kernel; None means that it is not."""
    loss: Literal["fused"] | None = None
    """Whether the loss is fused with the projection to the vocabulary; None means plain."""
    products: Literal["float8"] | None = None
    """Type of the factors in linear layers of blocks if `precision` does not say it: a float8 plan
    is proved in float64."""
    attention: OtherAttention | None = None
    """How attention is computed; None means `flash`, the fused kernel that torch prefers."""
    parallel: Parallelism = Parallelism()
    sharding: ShardingDegrees = ShardingDegrees()
    offload: Offload = Offload()
    batch: Batch
    stages: tuple[Stage, ...] = Field(min_length=1)
    """Model chunks in layer order; chunk `k` of p pipeline ranks is on rank `k mod p`."""

    @model_validator(mode="after")
    def _stages_follow_each_other(self) -> Self:
        parallel = self.parallel
        if len(self.stages) != parallel.pipeline * parallel.virtual_stages:
            chunks = (
                f" x `parallel.virtual_stages` = {parallel.virtual_stages}"
                if parallel.virtual_stages > 1
                else ""
            )
            raise ValueError(
                f"{len(self.stages)} stages for `parallel.pipeline` = {parallel.pipeline}{chunks}; "
                "write one `[[stages]]` for each"
            )
        next_layer = 0
        for index, stage in enumerate(self.stages):
            for first, end in stage.phases:
                if first != next_layer or end <= first:
                    raise ValueError(
                        f"stage {index} has phase [{first}, {end}) where one from {next_layer} is "
                        "due"
                    )
                next_layer = end
        return self

    def __repr__(self) -> str:
        parallel, batch = self.parallel, self.batch
        degrees = f"PP={parallel.pipeline} TP={parallel.tensor} DP={parallel.data}"
        phases = sum(len(stage.phases) for stage in self.stages)
        return (
            f"<Plan {self.label} of {self.graph} on {self.machine}: {degrees}, {self.precision}, "
            f"{batch.accumulation} x {batch.micro} sequences of {batch.sequence}, recompute "
            f"{self.recompute}, {phases} {'phase' if phases == 1 else 'phases'}>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.to_toml())}</pre>"

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
        """The tier of each class of tensors that is offloaded."""
        tiers: dict[OffloadClass, str] = {
            "parameters": self.offload.parameters,
            "gradients": self.offload.gradients,
            "optimizer": self.offload.optimizer,
            "activations": self.offload.activations,
        }
        return {name: tier for name, tier in tiers.items() if tier != DEVICE_TIER}

    def is_offloaded(self, name: OffloadClass) -> bool:
        """Whether a class of tensors is outside device memory between uses."""
        return bool(getattr(self.offload, name) != DEVICE_TIER)

    @property
    def offloads(self) -> bool:
        """Whether the plan offloads anything."""
        return bool(self.offload_tiers)

    @property
    def defers_updates(self) -> bool:
        """Whether an offloaded layer's update waits for its next prefetch, in the next step.

        The global gradient norm is known only after the whole backward pass. The gradients of all
        phases but the first are offloaded by then, and wait beside their optimizer state.
        """
        return self.clip and self.is_offloaded("gradients")

    @property
    def phase_count(self) -> int:
        """Phases of the pipeline rank with most; 1 if it holds all of its layers at once."""
        if not self.is_offloaded("parameters"):
            return 1
        ranks = self.parallel.pipeline
        chunks = (self.stages[rank::ranks] for rank in range(ranks))
        return max(sum(len(chunk.phases) for chunk in each) for each in chunks)

    @property
    def recompute(self) -> Recompute:
        """The most that any stage recomputes."""
        modes: tuple[Recompute, ...] = get_args(Recompute)
        return max((stage.recompute for stage in self.stages), key=modes.index)

    @property
    def label(self) -> str:
        """Twelve hexadecimal digits that identify this plan."""
        return self.fingerprint()

    @property
    def parameter_itemsize(self) -> int:
        """Bytes per element of the weights that layers compute with."""
        return PRECISION_BYTES[self.precision]

    @property
    def has_master_weights(self) -> bool:
        """Whether layers compute with copies of float32 master weights."""
        has_copies = self.precision in ("bfloat16", "float16", "float8", "float4")
        return has_copies and self.master_weights is None

    @property
    def multiplies_float8(self) -> bool:
        """Whether linear layers of blocks multiply 8-bit factors."""
        return "float8" in (self.precision, self.products)

    def moment_bytes(self, elements: int, *, matrix: bool = False) -> int:
        """Bytes of all moments of one weight with n elements, scales included.

        With two moments in int8 that is `2 n + 2 * 4 * ceil(n / 256)`, 2.03 bytes per element.

        Args:
            matrix: whether it is a matrix between the first and the last layer.
        """
        scales = -(-elements // MOMENT_BLOCK) if self.moments == "int8" else 0
        widening = 2 if self.precision == "float64" else 1
        moment = widening * _MOMENT_BYTES[self.moments] * elements + _SCALE_BYTES * scales
        return optimizer_law(self.optimizer).moments_of(matrix=matrix) * moment

    def state_bytes(self, elements: int, *, matrix: bool = False) -> int:
        """Bytes of one weight's optimizer state.

        These are its moments, its average, and its master weights if they are separate.
        """
        moments = self.moment_bytes(elements, matrix=matrix)
        wide = 8 if self.precision == "float64" else 4
        return moments + wide * elements * ((self.ema is not None) + self.has_master_weights)

    @property
    def optimizer_bytes_per_parameter(self) -> float:
        """Bytes of optimizer state for each element of a large weight, of any kind the least."""
        least = min(self.state_bytes(MOMENT_BLOCK, matrix=each) for each in (True, False))
        return least / MOMENT_BLOCK

    @property
    def gradient_itemsize(self) -> int:
        """Bytes per element of the gradient; accumulated gradients are at least float32."""
        if self.batch.accumulation > 1:
            return max(4, self.parameter_itemsize)
        return self.parameter_itemsize
