"""DataflowReport: what a layer moves to and from far memory, by how far its ops are fused.

Every number is predicted, with ideal traffic: an op reads each operand once and writes its result
once. The words are those of Prabhakar et al. 2024, arXiv:2405.07518, and of Srinivasan et al. 2023,
arXiv:2304.05511.
"""

from typing import Literal

from windlass.document import Document
from windlass.schema.graph import OpKind, Precision

FusionLevel = Literal["kernel by kernel", "epilogue", "dataflow"]
"""`kernel by kernel`: each op reads and writes far memory. `epilogue`: element-wise ops run with
the op that makes their operand. `dataflow`: sections as large as the chip's memory allows."""

FlowPass = Literal["forward", "training forward", "backward"]
"""`forward` saves nothing for backward, as inference and full recompute; `training forward` writes
what backward reads to far memory."""

FlowRole = Literal["attention", "feed-forward"]
"""A branch of a transformer's block: from its first matrix product to its last."""


class FlowOp(Document):
    """One op of a pass."""

    name: str
    kind: OpKind
    weight: str | None
    """Name of the weight that a matrix product reads; None for any other op."""
    flop: float
    read_bytes: float
    written_bytes: float

    @property
    def label(self) -> str:
        """`addmm hidden.input`: the op, and the module whose weight it reads."""
        module = (self.weight or "").rpartition(".")[0]
        return f"{self.name} {module}".rstrip()


class FlowEdge(Document):
    """Bytes of one tensor that one op makes and another reads."""

    tensor: str
    source: int | None
    """Index of the op that makes it; None if it comes from far memory."""
    target: int | None
    """Index of the op that reads it; None if it goes to far memory."""
    nbytes: float
    is_weight: bool
    """Whether it is a parameter, or the gradient of one."""

    @property
    def on_chip(self) -> bool:
        """Whether it does not pass through far memory."""
        return self.source is not None and self.target is not None


class FlowSection(Document):
    """A run of ops done before anything goes back to far memory."""

    first: int
    """Index of its first op."""
    last: int
    """Index after its last op."""
    flop: float
    read_bytes: float
    """Bytes read from far memory."""
    written_bytes: float
    """Bytes written to far memory."""
    on_chip_bytes: float
    """Memory on the chip that it needs for this traffic."""
    seconds: float

    @property
    def far_bytes(self) -> float:
        """Bytes read from and written to far memory."""
        return self.read_bytes + self.written_bytes


class FusedPass(Document):
    """A pass whose ops are fused to one degree."""

    fusion: FusionLevel
    sections: tuple[FlowSection, ...]
    edges: tuple[FlowEdge, ...]
    flop: float
    far_bytes: float
    """Bytes read from and written to far memory."""
    kept_bytes: float
    """Bytes on edges that stay on the chip."""
    intensity: float
    """FLOP for each byte of far memory."""
    compute_seconds: float
    """Time of the arithmetic alone."""
    seconds: float
    """Each section takes the longer of its arithmetic and its traffic."""

    @property
    def on_chip_bytes(self) -> float:
        """Memory on the chip that the largest section needs."""
        return max(section.on_chip_bytes for section in self.sections)

    @property
    def needed_bandwidth(self) -> float:
        """Bytes/s of far memory with which the arithmetic need not wait; 0 without arithmetic."""
        return self.far_bytes / self.compute_seconds if self.compute_seconds else 0.0


class PassFlow(Document):
    """One pass of a layer, fused to each degree."""

    name: FlowPass
    ops: tuple[FlowOp, ...]
    levels: tuple[FusedPass, ...]
    """Kernel by kernel, epilogue, dataflow."""
    whole: FusedPass
    """All ops as one section, as on a chip that is large enough."""

    def level(self, fusion: FusionLevel) -> FusedPass:
        """The pass fused to one degree."""
        return next(each for each in self.levels if each.fusion == fusion)


class ChipRates(Document):
    """Memory and rates of one device that decide what fusing is worth."""

    machine: str
    on_chip_bytes: float
    """Memory on the chip."""
    far_memory: str
    """Name of the tier that sections read and write."""
    far_rate: float
    """Bytes/s that large reads of that tier reach."""
    product_rate: float
    """FLOP/s that large matrix products reach."""
    attention_rate: float
    """FLOP/s that fused attention reaches."""

    @property
    def ridge(self) -> float:
        """FLOP for each byte at which matrix products take as long as their traffic."""
        return self.product_rate / self.far_rate


class SparsityLevel(Document):
    """One pass at one sparsity, fused to one degree."""

    sparsity: float
    """Share of weights that are absent."""
    fusion: FusionLevel
    far_bytes: float
    intensity: float
    needed_bandwidth: float
    """Bytes/s of far memory with which the arithmetic need not wait."""
    on_chip_bytes: float
    """Memory on the chip that the largest section needs; of `dataflow`, that the whole pass needs
    as one section."""
    seconds: float
    speed_up: float
    """Over the dense pass kernel by kernel."""


class DataflowReport(Document):
    """What one kind of layer moves to and from far memory on one device; all of it predicted."""

    model: str
    kind: str
    """Kind of layer."""
    layers: int
    """Layers of this kind."""
    role: FlowRole | None
    """None means the whole layer."""
    micro: int
    """Sequences of a micro-batch."""
    sequence: int
    """Tokens of a sequence."""
    precision: Precision
    kept: dict[str, float]
    """Kept share of each sparse weight in `passes`, by name; empty for a dense layer."""
    chip: ChipRates
    passes: tuple[PassFlow, ...]
    curve: tuple[SparsityLevel, ...]
    """The forward pass at several sparsities; empty for a model that is sparse itself."""
    memory_bound_above: dict[FusionLevel, float | None]
    """Sparsity above which the forward pass as a whole has fewer FLOP for each byte than the ridge;
    None if it has more at every sparsity. `dataflow` is one section here."""

    def flow(self, name: FlowPass) -> PassFlow:
        """One of the passes."""
        return next(each for each in self.passes if each.name == name)
