"""Stack: the software that runs a plan on a machine, as a few constants and capabilities."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.machine.provenance import Source
from windlass.schema.optimizers import OptimizerName
from windlass.schema.plan import PipelineSchedule, Recompute
from windlass.units import Bytes, Seconds

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]
"""How attention is computed. `unfused`: two batched matrix products with a softmax between them,
which writes every score. `flash1` to `flash3`: FlashAttention of that generation, or a kernel as
fast, such as cuDNN's; it writes no scores."""

Fusion = Literal["eager", "fused", "compiled"]
"""How element-wise ops run. `eager`: one kernel for each op. `fused`: hand-written kernels for bias
with GELU, bias with dropout and residual, softmax with mask (Megatron). `compiled`: neighbours in
one kernel (torch.compile, XLA)."""

ParameterSharding = Literal["none", "optimizer", "parameters"]
"""What data-parallel ranks share: nothing, optimizer state (ZeRO-1), or parameters too (ZeRO-3)."""


HostSeconds = Annotated[Seconds, Field(ge=0, le=60)]
"""A time that a host takes each time; more than a minute is none."""

Rate = Annotated[float, Field(ge=0.01, le=100)]
"""A rate over the machine's."""


class _StackTable(Document):
    """A table of a stack's file: its numbers are finite, and its keys have meanings."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)


class Capabilities(_StackTable):
    """What a stack can run; planning for it is bound by that."""

    schedules: tuple[PipelineSchedule, ...] = ("1f1b",)
    """Pipeline schedules."""
    precisions: tuple[Precision, ...] = ("bfloat16",)
    """Number formats of matrix products."""
    sharding: tuple[ParameterSharding, ...] = ("none", "optimizer")
    """What data-parallel ranks can share: nothing, optimizer state (ZeRO-1), or parameters."""
    reshard: bool = False
    """Whether parameters can be freed after each pass and gathered again for the next (FSDP)."""
    replica_groups: bool = False
    """Whether parameters can be sharded within groups of replicas (HSDP)."""
    tensor: bool = True
    """Whether layers can be divided over ranks (tensor parallelism)."""
    tensor_grids: bool = False
    """Whether they can be divided in two dimensions."""
    context: bool = False
    """Whether a sequence can be divided over ranks (context parallelism)."""
    expert: bool = False
    """Whether experts can be divided over ranks (expert parallelism)."""
    adapters: bool = False
    """Whether adapters of all linear layers of blocks can be trained beside frozen weights."""
    pipeline: bool = True
    """Whether layers can be on pipeline stages."""
    compile: bool = False
    """Whether a plan says if layers are compiled; else `fusion` does."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    """How activations can be recomputed."""
    offload: bool = False
    """Whether optimizer state and weights can lie outside device memory."""
    fused_loss: bool = False
    """Whether the loss can be fused with the projection to the vocabulary."""
    optimizers: tuple[OptimizerName, ...] | None = None
    """Optimizers; None means any."""
    small_moments: bool = False
    """Whether moments can be kept in 16 or 8 bits."""
    step_graph: bool = False
    """Whether a plan says if steps are recorded and replayed."""
    averages: bool = True
    """Whether averages of the weights can be kept beside them (EMA)."""
    own_masters: bool = True
    """Whether bfloat16 weights can be updated without float32 copies."""
    sparsity: bool = True
    """Whether weights can lack blocks."""


class StackMemory(_StackTable):
    """Memory that a stack's process holds beside tensors of the plan."""

    context_bytes: Bytes | None = None
    """Context and kernels of one process; None means the device's number."""
    buffer_bytes: Bytes = 0
    """Buffers for reducing and gathering."""
    gradient_bytes: float = Field(default=0.0, ge=-2, le=64)
    """Bytes of each gradient element beyond the plan's: a second copy, or buckets; -2 where sums of
    micro-batches are in 16 bits."""
    activations: float = Field(default=1.0, gt=0, le=10)
    """Bytes of activations over those that the graph's kernels need."""
    allocator_share: float = Field(default=0.0, ge=0, le=1)
    """Share of live bytes that the allocator holds beyond them."""


class Stack(_StackTable):
    """A software stack: what it can do, which kernels it runs and what its host costs."""

    name: str
    about: str
    engine: Literal["torch"] | None = None
    """Engine of Windlass that trains its plans, on the layers of the own runtime; None means that
    plans for it are only predicted."""
    similar_to: str | None = None
    """Stack whose constants this one starts from."""
    constants_of: str | None = None
    """Stack whose constants hold here too, but for those that are stated; its kernels are nearest.
    """
    can: Capabilities = Capabilities()
    attention: AttentionKernel = "flash2"
    """Kernel of attention: `unfused` writes every score, `flash1` to `flash3` write none."""
    fusion: Fusion = "fused"
    """How element-wise ops run: each in a kernel (`eager`), in hand-written kernels (`fused`), or
    with their neighbours (`compiled`)."""
    sequence_parallel: bool = True
    """Whether norms and dropouts are divided over tensor-parallel ranks."""
    dropout: bool = False
    """Whether published runs on it trained with dropout."""
    selective: Literal["attention", "products"] = "attention"
    """What selective recompute repeats: attention (Megatron), or every op but each second matrix
    product (torchtitan)."""
    fused_optimizer: bool = True
    """Whether norm and update launch a few kernels for all weights at once (apex, torch's foreach),
    not some for each."""
    recompute_stops_early: bool = False
    """Whether recompute ends with the last result that the backward pass needs, before a block's
    last product (torch's non-reentrant checkpoint)."""
    overlaps_reduction: bool = False
    """Whether gradients are reduced over replicas beside the last backward pass."""
    overlaps_gather: bool = False
    """Whether ZeRO-1 gathers updated parameters beside the next forward pass."""
    tensor_overlap: float = Field(default=0.0, ge=0, le=1)
    """Share of tensor-parallel communication beside matrix products (asynchronous tensor
    parallelism)."""
    stages_adjacent: bool = False
    """Whether the pipeline stages of a replica are neighbours and replicas lie further apart
    (PopART); else it is the other way round (Megatron)."""
    launch_seconds: HostSeconds | None = None
    """Host time to launch one kernel; None means the device's number."""
    pair_launches: float = Field(default=0.0, ge=0, le=100)
    """Share by which launches take longer when 8 tensor-parallel ranks wait for each other; for t
    ranks it grows with the pairs, `t (t - 1) / 56`."""
    collective_seconds: HostSeconds = 0.0
    """Fixed time of each tensor-parallel collective beyond the links' latency, for each doubling of
    its ranks."""
    message_seconds: HostSeconds = 0.0
    """Fixed time of a message to another stage beyond the link's latency."""
    step_seconds: HostSeconds = 0.0
    """Host time of each step outside passes and updates: data, logging, loss scaling."""
    gradient_sums: Literal["separate", "half", "fused"] = "separate"
    """How gradients of several micro-batches are summed. `separate`: into float32, by kernels of
    their own. `half`: in 16 bits, by kernels of their own. `fused`: into float32, by the matrix
    products that make them."""
    reduce_bytes: float | None = Field(default=None, gt=0, le=8)
    """Bytes of each gradient element that replicas reduce; None means those of the plan's sums."""
    gather_exposed: float = Field(default=0.0, ge=0, le=1)
    """Share of FSDP's gathers and scatters that passes do not cover."""
    products: Rate = 1.0
    """Rate of matrix products over the machine's."""
    attention_rate: Rate = 1.0
    """Rate of attention over the machine's for that kernel."""
    context_attention: float = Field(default=0.0, ge=0)
    """Share by which attention takes longer when a sequence is divided over many context-parallel
    ranks; for c ranks it is `1 - 1/c` of that."""
    cast_bytes: float = Field(default=6.0, ge=0)
    """Bytes moved for each number that becomes an 8-bit one: two read for its scale, two read again
    and one written in each layout; more with a scale for each row."""
    traffic: Rate = 1.0
    """Rate of element-wise kernels over the machine's."""
    memory: StackMemory = StackMemory()
    deviation: float | None = Field(default=None, gt=0, le=2)
    """Standard deviation of log(measured / predicted) over published runs; None if none are
    known."""
    expert_deviation: float | None = Field(default=None, gt=0, le=2)
    """The same of models with experts; None means as of others."""
    memory_deviation: float | None = Field(default=None, gt=0, le=2)
    """The same of peak memory."""
    sources: dict[str, Source] = Field(default_factory=dict)
    """Source of each constant by its key, with the rows that it was fitted to."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset(
        {"sources", "about", "similar_to", "constants_of"}
    )

    def step_deviation(self, *, has_experts: bool) -> float | None:
        """Standard deviation of log(measured / predicted) of a model's steps, if any is known."""
        return (self.expert_deviation if has_experts else None) or self.deviation

    def __hash__(self) -> int:
        """Hash of the name; the sources are not hashable."""
        return hash(self.name)


OWN_STACK = Stack(
    name="windlass",
    about="Windlass's own runtime on PyTorch",
    can=Capabilities(
        schedules=("gpipe", "1f1b", "interleaved", "zero-bubble"),
        precisions=("float32", "tf32", "bfloat16", "float16", "float64", "float8"),
        sharding=("none", "optimizer", "parameters"),
        replica_groups=True,
        tensor_grids=True,
        context=True,
        expert=True,
        compile=True,
        small_moments=True,
        step_graph=True,
        offload=True,
        fused_loss=True,
    ),
    fusion="eager",
    selective="products",
    fused_optimizer=False,
    overlaps_reduction=True,
)
"""What drives a machine that names no stack."""
