"""The report on one kind of layer: its passes on one device, and how sparsity changes them.

A section takes the longer of its arithmetic and its traffic (roofline; Williams et al. 2009,
CACM 52(4)). Kept blocks of a weight are computed at the rate of dense products.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from windlass.capture import NamedTrace
from windlass.cost.dataflow.pass_ops import PassOps, pass_ops
from windlass.cost.dataflow.sections import (
    Ranges,
    SectionNeeds,
    best_sections,
    kernel_by_kernel,
    section_edges,
    section_ranges,
)
from windlass.errors import MachineError
from windlass.schema import (
    ChipRates,
    DataflowReport,
    FlowOp,
    FlowPass,
    FlowRole,
    FlowSection,
    FusedPass,
    FusionLevel,
    Machine,
    MatmulRate,
    PassFlow,
    Precision,
    SparsityLevel,
)

_PASSES: tuple[FlowPass, ...] = ("forward", "training forward", "backward")
_LEVELS: tuple[FusionLevel, ...] = ("kernel by kernel", "epilogue", "dataflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowSubject:
    """What a report is about."""

    model: str
    kind: str
    """Kind of layer."""
    layers: int
    """Layers of this kind."""
    traced: NamedTrace
    """The dense layer."""
    role: FlowRole | None
    """None means the whole layer."""
    size: tuple[int, int]
    """Sequences of a micro-batch, and tokens of a sequence."""
    precision: Precision
    can_be_sparse: bool
    """Whether the weights of its matrix products can be sparse: not in an embedding or a head."""
    kept: Mapping[str, float] | None = None
    """Kept share of each sparse weight by name; None if the layer is dense."""

    def pass_ops(self, name: FlowPass, sparsity: float = 0.0) -> PassOps:
        """The ops of one pass, with a share of all weights absent if the layer is dense."""
        kept = 1.0 - sparsity if self.kept is None else self.kept
        return pass_ops(self.traced, name, self.size, kept=kept, role=self.role)


def chip_rates(machine: Machine, precision: Precision) -> ChipRates:
    """The memory and rates of one device of a machine.

    Far memory is the device memory, or the next tier if the device memory itself is on the chip.

    Raises:
        MachineError: its file does not state its memory on the chip, or no memory beyond that.
    """
    device = machine.device
    if device.on_chip_bytes is None:
        raise MachineError(
            f"machine `{machine.name}` does not state the memory on its chip; add "
            '`on_chip_bytes = "40 MB"` (its last-level cache or SRAM) to `[device]` in its file'
        )
    far = next((tier for tier in device.tiers if tier.capacity_bytes > device.on_chip_bytes), None)
    if far is None:
        raise MachineError(
            f"machine `{machine.name}` has no memory beyond the {device.on_chip_bytes / 1e6:.0f} "
            "MB on its chip; add a `[[device.tiers]]` with `read` and `write` to its file"
        )
    rate = device.rate(precision)
    return ChipRates(
        machine=machine.name,
        on_chip_bytes=device.on_chip_bytes,
        far_memory=far.name,
        far_rate=far.read or device.traffic.points[-1].rate,
        product_rate=_product_rate(rate),
        attention_rate=max(point.rate for point in rate.attention.points),
    )


def _product_rate(rate: MatmulRate) -> float:
    """FLOP/s that large products reach, by the rates that predict them (`cost.op_time`)."""
    if rate.tiles is not None:
        return rate.peak * rate.tiles.efficiency
    measured = [each.flop_rate for each in rate.products]
    return max(measured) if measured else max(point.rate for point in rate.curve.points)


def dataflow_report(
    subject: DataflowSubject, machine: Machine, sparsities: Sequence[float]
) -> DataflowReport:
    """What a kind of layer moves on one device of a machine.

    Args:
        subject: the layer.
        sparsities: shares of absent weights for the curve; ignored for a layer that is sparse.

    Raises:
        MachineError: the machine's file does not say enough.
    """
    chip = chip_rates(machine, subject.precision)
    flows = tuple(_pass_flow(subject.pass_ops(name), name, chip) for name in _PASSES)
    is_dense = subject.can_be_sparse and subject.kept is None
    micro, sequence = subject.size
    return DataflowReport(
        model=subject.model, kind=subject.kind, layers=subject.layers, role=subject.role,
        micro=micro, sequence=sequence, precision=subject.precision,
        kept=dict(subject.kept or {}),
        chip=chip, passes=flows,
        curve=tuple(_curve(subject, flows[0], chip, sparsities)) if is_dense else (),
        memory_bound_above=_thresholds(subject, flows[0], chip) if is_dense else {},
    )  # fmt: skip


def _pass_flow(passed: PassOps, name: FlowPass, chip: ChipRates) -> PassFlow:
    ranges = section_ranges(passed)
    return PassFlow(
        name=name,
        ops=tuple(
            FlowOp(
                name=op.name, kind=op.kind, weight=op.weight, flop=op.flop,
                read_bytes=op.read_bytes, written_bytes=op.written_bytes,
            )
            for op in passed.ops
        ),
        levels=tuple(
            _fused_pass(passed, level, _level_sections(passed, ranges, level, chip), chip)
            for level in _LEVELS
        ),
        whole=_fused_pass(passed, "dataflow", [ranges[0, len(passed.kernels)]], chip),
    )  # fmt: skip


def _level_sections(
    passed: PassOps, ranges: Ranges, level: FusionLevel, chip: ChipRates
) -> tuple[SectionNeeds, ...]:
    if level == "kernel by kernel":
        return kernel_by_kernel(passed)
    return best_sections(ranges, chip.on_chip_bytes if level == "dataflow" else 0.0)


def _fused_pass(
    passed: PassOps, level: FusionLevel, sections: Sequence[SectionNeeds], chip: ChipRates
) -> FusedPass:
    found = tuple(_flow_section(passed, section, chip) for section in sections)
    edges = tuple(edge for section in sections for edge in section_edges(passed, section))
    flop, far_bytes = sum(each.flop for each in found), sum(each.far_bytes for each in found)
    return FusedPass(
        fusion=level,
        sections=found,
        edges=edges,
        flop=flop,
        far_bytes=far_bytes,
        kept_bytes=sum(edge.nbytes for edge in edges if edge.on_chip),
        intensity=flop / far_bytes,
        compute_seconds=_compute_seconds(passed, 0, len(passed.ops), chip),
        seconds=sum(each.seconds for each in found),
    )


def _flow_section(passed: PassOps, section: SectionNeeds, chip: ChipRates) -> FlowSection:
    first, last = section.first, section.last
    read, written = sum(section.reads.values()), sum(section.writes.values())
    compute = _compute_seconds(passed, first, last, chip)
    return FlowSection(
        first=first,
        last=last,
        flop=sum(op.flop for op in passed.ops[first:last]),
        read_bytes=read,
        written_bytes=written,
        on_chip_bytes=section.on_chip_bytes,
        seconds=max(compute, (read + written) / chip.far_rate),
    )


def _compute_seconds(passed: PassOps, first: int, last: int, chip: ChipRates) -> float:
    rates = {"attention": chip.attention_rate}
    ops = passed.ops[first:last]
    return sum(op.flop / rates.get(op.kind, chip.product_rate) for op in ops)


def _curve(
    subject: DataflowSubject, dense: PassFlow, chip: ChipRates, sparsities: Sequence[float]
) -> Iterator[SparsityLevel]:
    dense_seconds = dense.level("kernel by kernel").seconds
    for sparsity in sparsities:
        flow = _pass_flow(subject.pass_ops("forward", sparsity), "forward", chip)
        for level in flow.levels:
            needed = flow.whole if level.fusion == "dataflow" else level
            yield SparsityLevel(
                sparsity=sparsity,
                fusion=level.fusion,
                far_bytes=level.far_bytes,
                intensity=level.intensity,
                needed_bandwidth=level.needed_bandwidth,
                on_chip_bytes=needed.on_chip_bytes,
                seconds=level.seconds,
                speed_up=dense_seconds / level.seconds,
            )


def _thresholds(
    subject: DataflowSubject, dense: PassFlow, chip: ChipRates
) -> dict[FusionLevel, float | None]:
    """Sparsity at which the pass crosses the ridge: FLOP and bytes are linear in the density."""
    empty = _pass_flow(subject.pass_ops("forward", 1.0), "forward", chip)
    found: dict[FusionLevel, float | None] = {}
    for level in _LEVELS:
        (flop, far), (fixed_flop, fixed) = (
            (flow.whole.flop, flow.whole.far_bytes)
            if level == "dataflow"
            else (flow.level(level).flop, flow.level(level).far_bytes)
            for flow in (dense, empty)
        )
        # flop(d) - ridge * bytes(d) is linear too; below 0 the pass is memory-bound.
        surplus = flop - chip.ridge * far, fixed_flop - chip.ridge * fixed
        if surplus[1] >= 0:
            found[level] = None
        else:
            rise = surplus[0] - surplus[1]
            found[level] = max(0.0, 1 + surplus[1] / rise) if rise > 0 else 0.0
    return found
