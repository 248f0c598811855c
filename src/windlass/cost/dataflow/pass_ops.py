"""The ops of one pass of a layer at one size and sparsity, with the buffers that join them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from windlass.capture import FittedTrace, NamedTrace, TracedCall
from windlass.errors import RequestError
from windlass.schema import FlowPass, FlowRole, OpKind

TILE = 64
"""Tokens, or output features, that a section works on at once: the rows of the smallest tile with
which matrix units reach their rate (`wgmma` has 64; NVIDIA, PTX ISA). A convention."""

_ROLE_NAMES: Mapping[FlowRole, frozenset[str]] = {
    "attention": frozenset({"attention", "attn", "self_attn", "self_attention"}),
    "feed-forward": frozenset({"hidden", "mlp", "ffn", "feed_forward"}),
}
"""Names of the modules of a branch: ours, and those of Hugging Face and Llama."""

_NOT_ELEMENTWISE = ("norm", "softmax", "embedding", "scatter", "gather", "nll", "cat", "var", "sum")
"""Parts of the names of memory-bound ops that look beyond one element: these begin a kernel."""
_EQUAL_SHARE = 0.5
"""An element-wise op writes at least this share of its largest operand: a cast halves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBuffer:
    """One tensor of a pass."""

    name: str
    nbytes: float
    is_weight: bool
    """Whether it is a parameter, or the gradient of one."""
    survives: bool
    """Whether it is needed after the ops at hand, and so goes to far memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOp:
    """One op, with the bytes that it reads and writes of each buffer."""

    name: str
    kind: OpKind
    weight: str | None
    flop: float
    reads: Mapping[int, float]
    writes: Mapping[int, float]
    columns: float
    """Features of a matrix product's result; 0 for any other op."""

    @property
    def read_bytes(self) -> float:
        """Bytes of all operands."""
        return sum(self.reads.values())

    @property
    def written_bytes(self) -> float:
        """Bytes of all results."""
        return sum(self.writes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOps:
    """The ops of a pass in the order in which they run, in kernels."""

    ops: tuple[PassOp, ...]
    buffers: Mapping[int, PassBuffer]
    kernels: tuple[tuple[int, int], ...]
    """First op, and op after the last, of each kernel: an op and the element-wise ops after it."""
    tokens: int
    """Tokens of the micro-batch."""
    sequence: int
    """Tokens of a sequence."""


def pass_ops(
    traced: NamedTrace,
    name: FlowPass,
    size: tuple[int, int],
    *,
    kept: Mapping[str, float] | float = 1.0,
    role: FlowRole | None = None,
) -> PassOps:
    """The ops of one pass of a layer.

    Args:
        traced: the layer.
        name: the pass.
        size: sequences of the micro-batch, and tokens of a sequence.
        kept: share of each weight that is kept, by name; a number for all that matrix products
            read. Gradients are as large as their weights.
        role: the branch whose ops are wanted, from its first matrix product to its last; None wants
            all.

    Raises:
        RequestError: no weight of the layer has that role.
    """
    table = _Table(traced, size, kept)
    split = traced.fitted.trace.forward_calls
    calls = traced.fitted.trace.calls
    first, last = (split, len(calls)) if name == "backward" else (0, split)
    if role is not None:
        first, last = _role_range(table, role, first, last)
    ops = [table.op(index) for index in range(first, last)]
    ops, kernels = _in_kernels(ops)
    later = {access.buffer for call in calls[last:] for access in call.reads}
    if name == "forward":  # nothing is read again in backward
        later = {access.buffer for call in calls[last:split] for access in call.reads}
    touched = {buffer for op in ops for buffer in (*op.reads, *op.writes)}
    buffers = {
        buffer: table.buffer(buffer, survives=buffer in later or table.outlives(buffer, name))
        for buffer in sorted(touched)
    }
    micro, sequence = size
    return PassOps(
        ops=tuple(ops), buffers=buffers, kernels=kernels, tokens=micro * sequence,
        sequence=sequence,
    )  # fmt: skip


class _Table:
    """Numbers of a trace at one size, with some weights absent.

    Args:
        traced: the layer.
        size: sequences and tokens.
        kept: kept shares of weights by name, or of all.
    """

    def __init__(
        self, traced: NamedTrace, size: tuple[int, int], kept: Mapping[str, float] | float
    ) -> None:
        self._fitted: FittedTrace = traced.fitted
        self._size = size
        self.trace = traced.fitted.trace
        parameters = [i for i, each in enumerate(self.trace.buffers) if each.role == "parameter"]
        self.names = dict(zip(parameters, traced.parameters, strict=False))
        self.weights = {
            weight: call
            for call in self.trace.calls[: self.trace.forward_calls]
            if (weight := self.weight(call)) is not None
        }
        """Each weight of a matrix product, with the forward call that reads it."""
        self._kept = {
            weight: kept if isinstance(kept, float) else kept.get(self.names.get(weight, ""), 1.0)
            for weight in self.weights
        }
        self._kept |= {
            gradient: self._kept[weight]
            for call in self.trace.calls
            for gradient, weight in self._weight_gradients(call)
        }

    def _weight_gradients(self, call: TracedCall) -> Iterator[tuple[int, int]]:
        """Each gradient of a weight that a product writes, with the weight.

        It is made from what the weight was multiplied by, and is as large as the weight.
        """
        operands = {access.buffer for access in call.reads}
        for access in call.writes if call.kind == "matmul" else ():
            buffer = self.trace.buffers[access.buffer]
            if buffer.role != "parameter_gradient":
                continue
            for weight, forward in self.weights.items():
                shared = {each.buffer for each in forward.reads} & operands
                size = self.number(self.trace.buffers[weight].nbytes)
                if shared and size == self.number(buffer.nbytes):
                    yield access.buffer, weight
                    break

    def weight(self, call: TracedCall) -> int | None:
        """The buffer of the weight that a matrix product reads: its largest parameter."""
        if call.kind != "matmul":
            return None
        reads = [a for a in call.reads if self.trace.buffers[a.buffer].role == "parameter"]
        largest = max(reads, key=lambda access: self.number(access.nbytes), default=None)
        return None if largest is None or len(call.reads) == 1 else largest.buffer

    def number(self, index: int) -> float:
        """A number of the trace at this size."""
        return self._fitted.numbers[index].at(*self._size)

    def op(self, index: int) -> PassOp:
        """One call as an op."""
        call = self.trace.calls[index]
        weight = self.weight(call)
        touched = {access.buffer for access in (*call.reads, *call.writes)}
        density = min((self._kept[buffer] for buffer in touched & self._kept.keys()), default=1.0)
        return PassOp(
            name=_op_name(call),
            kind=call.kind,
            weight=None if weight is None else self.names.get(weight),
            flop=self.number(call.flop) * (density if call.kind == "matmul" else 1.0),
            reads=self._bytes((access.buffer, access.nbytes) for access in call.reads),
            writes=self._bytes((access.buffer, access.nbytes) for access in call.writes),
            columns=0.0 if call.matmul_sizes is None else self.number(call.matmul_sizes[2]),
        )

    def _bytes(self, accesses: Iterable[tuple[int, int]]) -> dict[int, float]:
        totals: dict[int, float] = {}
        for buffer, nbytes in accesses:
            count = self.number(nbytes) * self._kept.get(buffer, 1.0)
            totals[buffer] = totals.get(buffer, 0.0) + count
        return totals

    def buffer(self, index: int, *, survives: bool) -> PassBuffer:
        """One buffer."""
        buffer = self.trace.buffers[index]
        return PassBuffer(
            name=self._name(index),
            nbytes=self.number(buffer.nbytes) * self._kept.get(index, 1.0),
            is_weight=buffer.role in ("parameter", "parameter_gradient"),
            survives=survives,
        )

    def outlives(self, index: int, name: FlowPass) -> bool:
        """Whether a buffer is needed after a pass."""
        buffer = self.trace.buffers[index]
        if name == "backward":
            return buffer.role == "parameter_gradient" or buffer.freed_at is None
        return buffer.role == "output"

    def _name(self, index: int) -> str:
        role = self.trace.buffers[index].role
        if role == "parameter":
            return self.names.get(index, "index of blocks")
        if role == "internal":
            call = next(
                call for call in self.trace.calls if index in {a.buffer for a in call.writes}
            )
            return f"result of {_op_name(call)}"
        return role.replace("_", " ")


def _op_name(call: TracedCall) -> str:
    """ATen's name of a call, without what tells its implementation."""
    if call.kind == "attention":
        return "attention_backward" if call.name.endswith("backward") else "attention"
    return call.name.removeprefix("_").removeprefix("native_")


def _role_range(table: _Table, role: FlowRole, first: int, last: int) -> tuple[int, int]:
    """The calls from a branch's first matrix product to its last.

    The gradient of a weight is made from what its input gradient is made from, so that a call which
    shares such an operand belongs to the branch too.
    """
    wanted = {
        buffer
        for buffer in table.weights
        if _ROLE_NAMES[role] & set(table.names.get(buffer, "").split("."))
    }
    if not wanted:
        names = ", ".join(sorted(_ROLE_NAMES[role]))
        raise RequestError(
            f"no matrix product of this layer belongs to its {role} branch, which has a module "
            f"named {names}; leave `--role` out, or name another kind of layer by `--kind`"
        )
    calls = table.trace.calls
    with_weight = [i for i in range(first, last) if table.weight(calls[i]) in wanted]
    is_backward = first > 0
    shared = {
        access.buffer
        for index in with_weight
        for access in calls[index].reads
        if is_backward and table.trace.buffers[access.buffer].role != "parameter"
    }
    inside = [
        index
        for index in range(first, last)
        if index in with_weight
        or (calls[index].kind == "matmul" and any(a.buffer in shared for a in calls[index].reads))
        or _sums(calls[index], shared)
    ]
    return inside[0], inside[-1] + 1


def _sums(call: TracedCall, operands: set[int]) -> bool:
    """Whether a call sums one of some operands, as the gradient of a bias does."""
    return call.name == "sum" and any(access.buffer in operands for access in call.reads)


def _in_kernels(
    ops: Sequence[PassOp],
) -> tuple[list[PassOp], tuple[tuple[int, int], ...]]:
    """The ops in the order of their kernels, and the range of each kernel.

    An element-wise op joins the kernel that made its operand, if its other operands are there by
    then; so it may run earlier than in the trace, but never before what it needs. One that
    overwrites an operand stays where it is, because other ops may read that before.
    """
    kernels: list[list[PassOp]] = []
    made_in: dict[int, int] = {}
    for op in ops:
        sources = [made_in[buffer] for buffer in op.reads if buffer in made_in]
        home = max(sources, default=len(kernels))
        moves_back = op.reads.keys() & op.writes.keys() and home < len(kernels) - 1
        if home == len(kernels) or moves_back or not _is_elementwise(op):
            home = len(kernels)
            kernels.append([])
        kernels[home].append(op)
        made_in.update(dict.fromkeys(op.writes, home))
    ranges, start = [], 0
    for kernel in kernels:
        ranges.append((start, start + len(kernel)))
        start += len(kernel)
    return [op for kernel in kernels for op in kernel], tuple(ranges)


def _is_elementwise(op: PassOp) -> bool:
    """Whether an op computes each element of its result from one of each operand."""
    if op.kind != "memory" or any(part in op.name for part in _NOT_ELEMENTWISE):
        return False
    return op.written_bytes >= _EQUAL_SHARE * max(op.reads.values(), default=0.0)
